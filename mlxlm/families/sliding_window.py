"""Which layers see a sliding window, as Hugging Face's configurations say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.validation import FULL, MOST_LAYERS, SLIDING


def read_sliding_window(
    values: Mapping[str, Any], window: Any, slides: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """`sliding_window` and `layer_types` for ModelConfig: the file's own list, or the layers that `slides` names.

    Where no layer slides there is no window, and where all do there is no list: one form for each meaning.
    """
    types, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None and isinstance(layers, int) and layers <= MOST_LAYERS:
        types = [SLIDING if slides(i) else FULL for i in range(layers)]
    if window is None or not isinstance(types, list) or SLIDING not in types:
        return {"sliding_window": None}
    if all(kind == SLIDING for kind in types):
        return {"sliding_window": window}
    return {"sliding_window": window, "layer_types": tuple(types)}


def write_sliding_window(config: ModelConfig) -> dict[str, Any]:
    """The same for `config.json`, with every layer's kind."""
    kinds = config.layer_types or [FULL if config.sliding_window is None else SLIDING] * config.num_hidden_layers
    return {"sliding_window": config.sliding_window, "layer_types": list(kinds)}
