"""A model from a folder: one of ours, a run, or any architecture that mlx_lm knows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx, nn
from mlxlm.checkpoint.safetensors import load_weights
from mlxlm.config import ModelConfig, read_json
from mlxlm.errors import CheckpointError, ConfigError
from mlxlm.model import Decoder


@dataclass(frozen=True)
class ForeignConfig:
    """What generation asks of the configuration of a model that mlx_lm provides."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_ids: frozenset[int]


def model_folder(path: Path | str) -> Path:
    """The folder that holds a model's weights: `path` itself, or the best checkpoint of a run.

    Raises CheckpointError if there is neither.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no model folder {path}", "the folder of a run or of an exported model")
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        if (path / "checkpoints").is_dir():
            raise CheckpointError(f"{path} is a run without a checkpoint yet", f"mlxlm pretrain --resume {path}")
        return path
    return min(checkpoints, key=lambda c: (_validation_loss(c), -step_of(c)))


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if step_of(p) >= 0), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of `.../step-N`, or -1 for another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _validation_loss(checkpoint: Path) -> float:
    try:
        loss = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["validation_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")
    return loss if isinstance(loss, int | float) else float("inf")


def load_model(path: Path | str) -> tuple[nn.Module, ModelConfig | ForeignConfig]:
    """A model ready to run, in evaluation mode, its weights read on first use.

    On a GPU the weights keep their dtype and quantization. On the CPU everything becomes float32, since
    MLX's half-precision and quantized products there are 10 to 1000 times slower; quantized weights stay
    as they are only where their float32 form would not fit into memory.
    Raises CheckpointError or ConfigError naming the file and the field.
    """
    root = Path(path)
    folder = model_folder(root)
    values = read_json(root)
    try:
        config = ModelConfig.from_dict(values, source=str(root / "config.json"))
    except ConfigError:
        if values.get("model_type", "llama") == "llama" and not _has_foreign_feature(values):
            raise
        return _load_foreign(root, values)
    model = Decoder(config)
    weights = {k: v for k, v in load_weights(folder).items() if not k.endswith("rotary_emb.inv_freq")}
    if config.quantization:
        if ON_CPU and 4 * config.parameter_count() < 0.7 * platform.total_memory():
            weights = dequantized(weights, config.quantization)
        else:
            quantize_modules(model, weights, config.quantization)
    if ON_CPU:
        weights = {k: _as_float32(v) for k, v in weights.items()}
    _check_names(model, weights, folder)
    model.load_weights(list(weights.items()))
    model.eval()
    return model, config


def layer_plan(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """Bits, group size and mode of one quantized layer: its own entry, or the default."""
    own = quantization.get(name)
    plan = own if isinstance(own, dict) else quantization
    return {"group_size": plan["group_size"], "bits": plan["bits"], "mode": plan.get("mode", "affine")}


def dequantized(weights: dict[str, mx.array], quantization: dict[str, Any]) -> dict[str, mx.array]:
    """The same weights with every quantized matrix in float32 (lazily), nothing rounded on the way."""
    result = {}
    for name, value in weights.items():
        if name.endswith((".scales", ".biases")):
            continue
        layer = name.removesuffix(".weight")
        scales = weights.get(f"{layer}.scales")
        if name.endswith(".weight") and scales is not None:
            plan, biases = layer_plan(quantization, layer), weights.get(f"{layer}.biases")
            if plan["mode"] == "affine":
                scales, biases = _as_float32(scales), _as_float32(biases)
            value = mx.dequantize(value, scales, biases, **plan)
        result[name] = value
    return result


def quantize_modules(model: nn.Module, weights: dict[str, mx.array], quantization: dict[str, Any]) -> None:
    """Replace the layers that have scales in `weights` by MLX's quantized ones."""

    def plan(name: str, _module: nn.Module):
        return layer_plan(quantization, name) if f"{name}.scales" in weights else False

    nn.quantize(model, quantization["group_size"], quantization["bits"], class_predicate=plan)


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


def _as_float32(value: mx.array) -> mx.array:
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


def _has_foreign_feature(values: dict[str, Any]) -> bool:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default"


def _load_foreign(folder: Path, values: dict[str, Any]) -> tuple[nn.Module, ForeignConfig]:
    """A model of another architecture, from mlx_lm. Code inside the folder is never run."""
    from mlx_lm.utils import load_model as load_with_mlx_lm

    load_weights(folder)  # checks the files
    try:
        model, _ = load_with_mlx_lm(folder, lazy=True, trust_remote_code=False)
    except Exception as error:  # mlx_lm raises anything from KeyError to RuntimeError for a file it can't read
        kind = values.get("model_type")
        raise CheckpointError(f"{folder}: mlx_lm can't load this {kind} model: {error}") from error
    if ON_CPU:
        model.apply(_as_float32)
    model.eval()
    eos = values.get("eos_token_id")
    config = ForeignConfig(
        model_type=str(values.get("model_type")),
        vocab_size=values.get("vocab_size", 2**31 - 1),
        max_position_embeddings=values.get("max_position_embeddings", 2**31 - 1),
        bos_token_id=values.get("bos_token_id"),
        eos_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
    )
    return model, config
