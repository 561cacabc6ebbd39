"""Names of layers, put together for people: one with * for the number where all layers have it."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def group_by_value(layers: Mapping[str, Value]) -> dict[Value, str]:
    """The names of each value, with * for the numbers of layers: {4: "model.layers.*.mlp.up_proj, lm_head"}."""
    found: dict[Value, dict[str, None]] = {}
    for name, value in layers.items():
        found.setdefault(value, {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    return {value: ", ".join(names) for value, names in found.items()}
