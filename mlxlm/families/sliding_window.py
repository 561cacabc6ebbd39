"""Which layers have a sliding window, in `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import HFConfig


def read_sliding_window(
    values: HFConfig, window: Any, has_window: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """ModelConfig's `sliding_window` and `layer_types`, in one form for each meaning.

    Without any windowed layer `sliding_window` is None; if all layers have the window, `layer_types` is omitted.

    Args:
        values: The parsed `config.json`, whose `layer_types` has precedence.
        window: The size of the window, or None.
        has_window: Whether a layer has the window, if there is no `layer_types`.
    """
    types, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None and isinstance(layers, int) and layers <= MAX_LAYERS:
        types = [SLIDING if has_window(i) else FULL for i in range(layers)]
    if window is None or not isinstance(types, list) or SLIDING not in types:
        return {"sliding_window": None}
    if all(layer_type == SLIDING for layer_type in types):
        return {"sliding_window": window}
    return {"sliding_window": window, "layer_types": tuple(types)}


def write_sliding_window(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sliding_window`, with the type of every layer."""
    types = config.layer_types or [FULL if config.sliding_window is None else SLIDING] * config.num_hidden_layers
    return {"sliding_window": config.sliding_window, "layer_types": list(types)}
