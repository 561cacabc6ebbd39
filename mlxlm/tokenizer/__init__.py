"""Tokenizers: load any common kind, train two kinds, encode, decode, stream, save.

One runtime serves every kind, `tokenizers.Tokenizer` (Rust); a SentencePiece model is converted to it in
memory.
"""

from mlxlm.tokenizer.detokenizer import StreamingDetokenizer
from mlxlm.tokenizer.files import load
from mlxlm.tokenizer.stats import TokenizerStats, tokenizer_stats
from mlxlm.tokenizer.tokenizer import Tokenizer
from mlxlm.tokenizer.train import TOKENIZER_TYPES, train

__all__ = ["TOKENIZER_TYPES", "TokenizerStats", "StreamingDetokenizer", "Tokenizer", "load", "tokenizer_stats", "train"]
