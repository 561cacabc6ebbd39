"""Names and layouts of tensors that mlx_lm's models don't read, made into those that they do."""

from __future__ import annotations

from collections.abc import Callable

from mlxlm.backend.mlx import mx, nn
from mlxlm.utils.errors import CheckpointError

Weights = dict[str, mx.array]


def patched_model_class(name: str, model_class: type[nn.Module], text_only: bool) -> type[nn.Module]:
    """mlx_lm's model `name`, reading the tensors that transformers 5 saves.

    text_only: the files are those of a language model alone, and mlx_lm's is the one with pictures.
    """

    class Adapted(model_class):
        def sanitize(self, weights: Weights) -> Weights:
            if text_only:
                weights = {_with_prefix(name): value for name, value in weights.items()}
            if name in _ADAPT:
                weights = _ADAPT[name](weights)
            return super().sanitize(weights) if hasattr(model_class, "sanitize") else weights

    return Adapted


def _with_prefix(name: str) -> str:
    return name if name.startswith("language_model.") else f"language_model.{name}"


def _ernie4_5_moe(weights: Weights) -> Weights:
    """mlx_lm leaves the correction of the router out."""
    for name, value in weights.items():
        if name.endswith("e_score_correction_bias") and mx.any(value != 0).item():
            raise CheckpointError(f"{name} isn't zero, and mlx_lm's ernie4_5_moe leaves it out")
    return weights


def _gpt_oss(weights: Weights) -> Weights:
    """Experts in 16 or 32 bits: matrices are `[experts, in, out]`, gate and up projection take turns in `out`."""
    result = {}
    for name, value in weights.items():
        stem, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj"):
            value = value.swapaxes(-1, -2)
        kind = "bias" if last.endswith("_bias") else "weight"
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            result[f"{stem}.gate_proj.{kind}"], result[f"{stem}.up_proj.{kind}"] = value[:, 0::2], value[:, 1::2]
        elif last in ("down_proj", "down_proj_bias"):
            result[f"{stem}.down_proj.{kind}"] = value
        else:
            result[name] = value
    return result


_ADAPT: dict[str, Callable[[Weights], Weights]] = {"ernie4_5_moe": _ernie4_5_moe, "gpt_oss": _gpt_oss}
