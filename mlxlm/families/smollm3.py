"""SmolLM 3: some layers have no rotary positions."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import (
    LLAMA_FIELDS,
    Family,
    HFConfig,
    read_bool,
    read_sliding_window,
    same_names,
    write_sliding_window,
)


def _read(values: HFConfig) -> dict[str, Any]:
    """`no_rope_layers` is 1 for layers with rotary positions."""
    layers, count, interval = (values.get(f) for f in ("no_rope_layers", "num_hidden_layers", "no_rope_layer_interval"))
    if layers is None and isinstance(count, int) and count <= MAX_LAYERS:
        interval = interval if isinstance(interval, int) and interval > 0 else 4
        layers = [(i + 1) % interval != 0 for i in range(count)]
    window = values.get("sliding_window") if read_bool(values, "use_sliding_window", False) else None
    rope = [bool(has) for has in layers] if isinstance(layers, list) else layers
    return {"rope_layers": None if rope and all(rope) else rope, **read_sliding_window(values, window)}


def _write(config: ModelConfig) -> dict[str, Any]:
    layers = [int(config.has_rope(layer)) for layer in range(config.num_hidden_layers)]
    windows = write_sliding_window(config)
    return {**windows, "use_sliding_window": config.sliding_window is not None, "no_rope_layers": layers}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    LLAMA_FIELDS | same_names("attention_bias", "mlp_bias", "sliding_window"),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    read_extra=_read,
    write_extra=_write,
)
