"""A model from its files, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx, nn
from mlxlm.checkpoint.foreign import ForeignConfig, load_foreign
from mlxlm.checkpoint.quantized import dequantized, quantize_modules
from mlxlm.checkpoint.source import Checkpoint, open_checkpoint
from mlxlm.checkpoint.tensors import Tensors
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder


def load_model(source: Path | str) -> tuple[nn.Module, ModelConfig | ForeignConfig]:
    """A model in evaluation mode, its weights read on first use. `source`: see `open_checkpoint`.

    Raises CheckpointError or ConfigError naming the file and the field.
    """
    return load_checkpoint(open_checkpoint(source))


def load_checkpoint(checkpoint: Checkpoint) -> tuple[nn.Module, ModelConfig | ForeignConfig]:
    """The model of an open checkpoint.

    On a GPU the weights keep their dtype and quantization. On the CPU everything becomes float32, since
    MLX's half-precision and quantized products there are 10 to 1000 times slower; quantized weights stay
    as they are only where their float32 form would not fit into memory.
    """
    config = checkpoint.config
    if config is None:
        return load_foreign(checkpoint)
    model = Decoder(config)
    fits = 4 * config.parameter_count() < 0.7 * platform.total_memory()
    _fill(model, checkpoint.tensors, "", config.quantization, ON_CPU and fits)
    return model, config


def load_part(module: nn.Module, tensors: Tensors, prefix: str, quantization: Mapping[str, Any] | None = None) -> None:
    """Fill `module`, one part of a decoder, with the tensors below `prefix` ("model.layers.3", or "" for all).

    In float32 on a CPU, dequantized; elsewhere a quantized matrix becomes one of MLX's quantized layers.
    """
    _fill(module, tensors, f"{prefix}." if prefix else "", quantization, ON_CPU)


def _fill(
    module: nn.Module, tensors: Tensors, prefix: str, quantization: Mapping[str, Any] | None, dequantize: bool
) -> None:
    part = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if quantization and dequantize:
        part = dequantized(part, quantization)
    elif quantization:
        quantize_modules(module, part, prefix, quantization)
    if ON_CPU:
        part = {name: t.astype(mx.float32) if mx.issubdtype(t.dtype, mx.floating) else t for name, t in part.items()}
    module.load_weights([(name.removeprefix(prefix), tensor.read()) for name, tensor in part.items()])
    module.eval()
