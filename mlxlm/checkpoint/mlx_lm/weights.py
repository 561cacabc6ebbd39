"""Convert tensors of transformers 5 to the names and layouts that mlx_lm's models read."""

from __future__ import annotations

from collections.abc import Callable

from mlxlm.backend.mlx import mx, nn
from mlxlm.utils.errors import CheckpointError

Weights = dict[str, mx.array]


def patched_model_class(name: str, model_class: type[nn.Module], text_only: bool) -> type[nn.Module]:
    """Return a subclass of mlx_lm's model `name` whose `sanitize` accepts the tensors that transformers 5 saves.

    Args:
        name: Module in `mlx_lm.models`.
        model_class: Its model.
        text_only: Whether the checkpoint is a language model alone and mlx_lm's model is multimodal.
    """

    class PatchedModel(model_class):
        """mlx_lm's model with another `sanitize`."""

        def sanitize(self, weights: Weights) -> Weights:
            """Rename and reshape tensors before mlx_lm's own `sanitize`."""
            if text_only:
                weights = {_with_prefix(name): value for name, value in weights.items()}
            if name in _CONVERT:
                weights = _CONVERT[name](weights)
            return super().sanitize(weights) if hasattr(model_class, "sanitize") else weights

    return PatchedModel


def _with_prefix(name: str) -> str:
    return name if name.startswith("language_model.") else f"language_model.{name}"


def _ernie4_5_moe(weights: Weights) -> Weights:
    """mlx_lm has no router correction bias."""
    for name, value in weights.items():
        if name.endswith("e_score_correction_bias") and mx.any(value != 0).item():
            raise CheckpointError(f"{name} isn't zero, which mlx_lm's ernie4_5_moe doesn't implement")
    return weights


def _gpt_oss(weights: Weights) -> Weights:
    """Unquantized experts: matrices are `[experts, in, out]`, gate and up projection alternate in `out`."""
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


_CONVERT: dict[str, Callable[[Weights], Weights]] = {"ernie4_5_moe": _ernie4_5_moe, "gpt_oss": _gpt_oss}
