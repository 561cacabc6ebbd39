"""Read and write models: safetensors in Hugging Face's layout, quantized or not."""

from mlxlm.checkpoint.load import load_model, model_folder
from mlxlm.checkpoint.safetensors import load_weights, save_weights

__all__ = ["load_model", "load_weights", "model_folder", "save_weights"]
