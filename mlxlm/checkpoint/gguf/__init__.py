"""GGUF, llama.cpp's format: `reader` opens a file as a checkpoint, `writer` writes one."""

from mlxlm.checkpoint.gguf.reader import FORMAT, open_gguf
from mlxlm.checkpoint.gguf.writer import IMPORTANCE_OUTTYPES, OUTTYPES, WriteResult, write

__all__ = ["FORMAT", "IMPORTANCE_OUTTYPES", "OUTTYPES", "WriteResult", "open_gguf", "write"]
