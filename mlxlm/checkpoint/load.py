"""A model from its files, ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, eval_in_parallel, mx, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors, quantize_modules
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.checkpoint.mlx_lm import MlxLmConfig, load_with_mlx_lm
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError

_MOST = 0.9  # of memory, for the weights


def load_model(source: Path | str) -> tuple[nn.Module, ModelConfig | MlxLmConfig]:
    """A model in evaluation mode. `source`: see `open_checkpoint`.

    Raises CheckpointError or ConfigError naming the file and the field.
    """
    return load_checkpoint(open_checkpoint(source))


def load_checkpoint(checkpoint: Checkpoint) -> tuple[nn.Module, ModelConfig | MlxLmConfig]:
    """The model of an open checkpoint.

    On a GPU the weights keep their dtype and quantization, and are read on first use. On the CPU they are read at
    once, and everything becomes float32, since MLX's half-precision and quantized products there are 10 to 1000
    times slower. Matrices whose float32 form would not fit into memory stay as they are, with a warning.

    Raises CheckpointError for weights that memory has no room for at all.
    """
    config = checkpoint.config
    if config is None:
        return load_with_mlx_lm(checkpoint)
    model = Decoder(config)
    _fill(model, checkpoint.tensors, "", config.quantization, not ON_CPU or _fits_float32(checkpoint))
    return model, config


def fits_float32(config: ModelConfig, memory: int) -> bool:
    """Whether so much memory has room for the weights in float32, and for what else there is."""
    return 4 * config.parameter_count() < 0.7 * memory


def _fits_float32(checkpoint: Checkpoint) -> bool:
    """Whether this machine has room for the weights in float32; a warning if not, an error if not even as they are."""
    memory, needed = platform.total_memory(), 4 * checkpoint.config.parameter_count()
    if fits_float32(checkpoint.config, memory):
        return True
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    fewer = "mlxlm quantize" if checkpoint.config.quantization is None else "mlxlm quantize, with fewer bits"
    if stored >= _MOST * memory:
        raise CheckpointError(
            f"{checkpoint.path}: its weights take {stored / 1e9:.3g} GB, this machine has {memory / 1e9:.3g} GB", fewer
        )
    problem = f"{checkpoint.path} needs {needed / 1e9:.3g} GB in float32, this machine has {memory / 1e9:.3g} GB"
    warnings.warn(f"{problem}: it stays as it is, and is slow on a CPU (try: {fewer})", stacklevel=3)
    return False


def load_float32_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """All weights of a decoder by name, in float32 and dequantized: what training begins with."""
    quantization = checkpoint.config.quantization
    return _in_float32(dequantize_tensors(checkpoint.tensors, quantization) if quantization else checkpoint.tensors)


def load_submodule(
    module: nn.Module, tensors: LazyTensors, prefix: str, quantization: Mapping[str, Any] | None = None
) -> None:
    """Fill `module`, one part of a decoder, with the tensors below `prefix` ("model.layers.3", or "" for all).

    In float32 on a CPU, dequantized, whatever the whole model takes; elsewhere a quantized matrix becomes one of MLX's
    quantized layers.
    """
    _fill(module, tensors, f"{prefix}." if prefix else "", quantization, fits=True)


def _fill(
    module: nn.Module, tensors: LazyTensors, prefix: str, quantization: Mapping[str, Any] | None, fits: bool
) -> None:
    """`fits`: on a CPU, whether there is room for float32."""
    part = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if quantization and ON_CPU and fits:
        part = dequantize_tensors(part, quantization)
    elif quantization:
        quantize_modules(module, part, prefix, quantization)
    if ON_CPU and (fits or quantization):  # with scales of 16 bits, quantized products are slower still
        values = _in_float32(part)
    else:
        values = {name: tensor.read() for name, tensor in part.items()}
    module.load_weights([(name.removeprefix(prefix), value) for name, value in values.items()])
    module.eval()


def _in_float32(tensors: LazyTensors) -> dict[str, mx.array]:
    """Floating-point values read and converted, few tensors at a time and on two processor cores.

    Left to the first use, all that is read would be in memory together with all that it is converted to: half as
    much again for 16-bit weights, and a third more time.
    """
    try:
        values = eval_in_parallel(lambda t=tensor: as_float32(t.read()) for tensor in tensors.values())
        return dict(zip(tensors, values, strict=True))
    except RuntimeError as error:
        raise CheckpointError(f"the weights can't be read: {error}", "a file that nobody writes meanwhile") from None
