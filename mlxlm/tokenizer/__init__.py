"""Tokenizers: load any common type, train two types, encode, decode, detokenize streams, save.

Encoding runs in `tokenizers.Tokenizer` (Rust); SentencePiece models are converted to it in memory.
"""

from mlxlm.tokenizer.detokenizer import StreamingDetokenizer
from mlxlm.tokenizer.files import load
from mlxlm.tokenizer.fill_in_the_middle import FillInTheMiddle
from mlxlm.tokenizer.stats import TokenizerStats, tokenizer_stats
from mlxlm.tokenizer.tokenizer import Tokenizer
from mlxlm.tokenizer.train import TOKENIZER_TYPES, train, truncate

__all__ = [
    "TOKENIZER_TYPES",
    "FillInTheMiddle",
    "StreamingDetokenizer",
    "Tokenizer",
    "TokenizerStats",
    "load",
    "tokenizer_stats",
    "train",
    "truncate",
]
