"""A model from its files, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.checkpoint.foreign import ForeignConfig, is_foreign, load_foreign
from mlxlm.checkpoint.layout import locate
from mlxlm.checkpoint.safetensors import as_float32, load_weights
from mlxlm.config import ModelConfig, read_json
from mlxlm.errors import CheckpointError
from mlxlm.model import Decoder


def load_model(path: Path | str) -> tuple[nn.Module, ModelConfig | ForeignConfig]:
    """A model in evaluation mode, its weights read on first use. `path`: see `locate`.

    On a GPU the weights keep their dtype and quantization. On the CPU everything becomes float32, since
    MLX's half-precision and quantized products there are 10 to 1000 times slower; quantized weights stay
    as they are only where their float32 form would not fit into memory.
    Raises CheckpointError or ConfigError naming the file and the field.
    """
    location = locate(path)
    config_file = location.root / "config.json"
    values = read_json(config_file)
    if is_foreign(values):
        return load_foreign(location.weights, values)
    config = ModelConfig.from_dict(values, source=str(config_file))
    weights = load_weights(location.weights)
    unused = {"lm_head.weight"} if config.tie_word_embeddings else set()  # some folders store the tied head too
    weights = {k: v for k, v in weights.items() if k not in unused and not k.endswith("rotary_emb.inv_freq")}
    model = Decoder(config)
    if config.quantization:
        _check_quantized(weights, config.quantization, location.weights)
        if ON_CPU and 4 * config.parameter_count() < 0.7 * platform.total_memory():
            weights = dequantized(weights, config.quantization)
        else:
            quantize_modules(model, weights, config.quantization)
    if ON_CPU:
        weights = {k: as_float32(v) for k, v in weights.items()}
    _check_names(model, weights, location.weights)
    model.load_weights(list(weights.items()))
    model.eval()
    return model, config


def layer_plan(quantization: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Bits and group size of one quantized layer: its own entry, or the default."""
    own = quantization.get(name)
    plan = own if isinstance(own, Mapping) else quantization
    return {"group_size": plan["group_size"], "bits": plan["bits"]}


def dequantized(weights: dict[str, mx.array], quantization: Mapping[str, Any]) -> dict[str, mx.array]:
    """The same weights with every quantized matrix in float32 (lazily), nothing rounded on the way."""
    result = {}
    for name, value in weights.items():
        if name.endswith((".scales", ".biases")):
            continue
        layer = name.removesuffix(".weight")
        if f"{layer}.scales" in weights:
            scales, biases = (as_float32(weights[f"{layer}.{part}"]) for part in ("scales", "biases"))
            value = mx.dequantize(value, scales, biases, **layer_plan(quantization, layer))
        result[name] = value
    return result


def quantize_modules(model: nn.Module, weights: dict[str, mx.array], quantization: Mapping[str, Any]) -> None:
    """Replace the layers that have scales in `weights` by MLX's quantized ones."""

    def plan(name: str, _module: nn.Module):
        return layer_plan(quantization, name) if f"{name}.scales" in weights else False

    nn.quantize(model, quantization["group_size"], quantization["bits"], class_predicate=plan)


def _check_quantized(weights: dict[str, mx.array], quantization: Mapping[str, Any], folder: Path) -> None:
    """Every quantized matrix has scales and biases of the shape that its bits and group size say."""
    for name in weights:
        if not name.endswith(".scales"):
            continue
        layer = name.removesuffix(".scales")
        parts = [weights.get(f"{layer}.{part}") for part in ("weight", "scales", "biases")]
        if any(part is None or part.ndim != 2 for part in parts):
            raise CheckpointError(f"{folder}: {layer} needs weight, scales and biases, each with two dimensions")
        packed, scales, biases = parts
        plan = layer_plan(quantization, layer)
        width = packed.shape[1] * 32 / plan["bits"]
        wanted = (packed.shape[0], width / plan["group_size"])
        if packed.dtype != mx.uint32 or scales.shape != wanted or biases.shape != wanted:
            raise CheckpointError(
                f"{folder}: {layer} is not of {plan['bits']} bits in groups of {plan['group_size']}, "
                "as config.json says"
            )


def _check_names(model: nn.Module, weights: dict[str, mx.array], folder: Path) -> None:
    """All weights there, none left over, every shape as the configuration says."""
    wanted = {name: value.shape for name, value in tree_flatten(model.parameters())}
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is not part of this model" for name in weights if name not in wanted]
    problems += [
        f"{name} is {list(value.shape)}, config.json says {list(wanted[name])}"
        for name, value in weights.items()
        if name in wanted and value.shape != wanted[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{folder}: the weights don't fit config.json: {'; '.join(problems[:3])}{more}")
