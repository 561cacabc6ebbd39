"""GGUF, llama.cpp's format: opened as a checkpoint, and written."""

from mlxlm.checkpoint.gguf.checkpoint import open_gguf
from mlxlm.checkpoint.gguf.writer import OUTTYPES, WriteResult, write

__all__ = ["OUTTYPES", "WriteResult", "open_gguf", "write"]
