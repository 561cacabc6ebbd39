"""Tokenizers: load any common kind, train two kinds, encode, decode, stream, save.

One runtime serves every kind, `tokenizers.Tokenizer` (Rust); a SentencePiece model is converted to it in
memory.
"""

from mlxlm.tokenizer.detokenizer import StreamDecoder
from mlxlm.tokenizer.files import load
from mlxlm.tokenizer.stats import Report, report
from mlxlm.tokenizer.tokenizer import Tokenizer
from mlxlm.tokenizer.train import KINDS, train

__all__ = ["KINDS", "Report", "StreamDecoder", "Tokenizer", "load", "report", "train"]
