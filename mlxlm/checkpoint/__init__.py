"""Read and write models: safetensors in Hugging Face's layout, quantized or not."""

from mlxlm.checkpoint.layout import locate
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.safetensors import load_weights, save_weights

__all__ = ["load_model", "load_weights", "locate", "save_weights"]
