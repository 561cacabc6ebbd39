"""llama2.c's `.bin` models and `tokenizer.bin` files, read and written."""

from mlxlm.checkpoint.llama2c.checkpoint import check_output_path, open_llama2c, write

__all__ = ["check_output_path", "open_llama2c", "write"]
