"""GGUF, llama.cpp's format: opened as a checkpoint, and written."""

from mlxlm.checkpoint.gguf.checkpoint import open_gguf
from mlxlm.checkpoint.gguf.writer import KINDS, Written, write

__all__ = ["KINDS", "Written", "open_gguf", "write"]
