"""EXAONE 4: norms on the outputs of sublayers; with windows, layers of full attention have no rotary positions."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import SLIDING
from mlxlm.families.family import (
    LLAMA_FIELDS,
    Family,
    HFConfig,
    read_sliding_window_pattern,
    rope_in_windows,
    same_names,
    write_sliding_window,
)


def _read(values: HFConfig) -> dict[str, Any]:
    windows = read_sliding_window_pattern(values, default_window=4096, default_pattern=4)
    if values.get("sliding_window", 4096) is None:
        return windows
    return {**windows, "rope_layers": rope_in_windows(values, windows)}


def _write(config: ModelConfig) -> dict[str, Any]:
    """Also what mlx_lm requires: the pattern, a letter for each layer, and a null for no scaling."""
    windows = write_sliding_window(config)
    pattern = "".join("L" if layer_type == SLIDING else "G" for layer_type in windows["layer_types"])
    scaling = {} if config.rope_scaling else {"rope_scaling": None}
    return {**windows, **scaling, "sliding_window_pattern": pattern if config.sliding_window else None}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "sliding_window"),
    defaults={"num_key_value_heads": 32},
    fixed_values={"norm_placement": "output", "qk_norm": "head"},
    read_extra=_read,
    write_extra=_write,
)
