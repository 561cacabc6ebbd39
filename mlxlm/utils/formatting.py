"""Text for people: numbers with three significant digits and a unit, grouped layer names, printable characters."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import TypeVar

from mlxlm.utils.errors import CONTROLS

_CONTROL_CHARACTERS = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{CONTROLS}]")
Value = TypeVar("Value", bound=Hashable)


def human_bytes(n: float) -> str:
    """Bytes in decimal units: 1234567890 -> 1.23 GB."""
    return _scaled(n, (" B", " kB", " MB", " GB", " TB", " PB"))


def human_count(n: float) -> str:
    """A count: 1234567 -> 1.23M."""
    return _scaled(n, ("", "k", "M", "B", "T"))


def human_flops(n: float) -> str:
    """Floating-point operations per second: 104e9 -> 104 GFLOP/s."""
    return _scaled(n, (" ", " k", " M", " G", " T", " P")) + "FLOP/s"


def human_seconds(s: float) -> str:
    """A duration in seconds: 75 -> 1m15s."""
    s = max(0, round(s))
    if s < 60:
        return f"{s}s"
    minutes, seconds = divmod(s, 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _scaled(n: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(n) < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}{units[-1]}" if abs(n) < 999.5 else f"{n:.0f}{units[-1]}"


def printable(text: str) -> str:
    """Replace every control character except tab and line feed with U+FFFD, so that no text can control a terminal.

    This includes characters that change the text direction, and line ends that only some terminals obey.
    """
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def group_layers_by_value(layers: Mapping[str, Value]) -> dict[Value, str]:
    """Join the names of layers with equal values, with * for numbers: {4: "model.layers.*.mlp.up_proj, lm_head"}."""
    names: dict[Value, dict[str, None]] = {}
    for name, value in layers.items():
        names.setdefault(value, {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    return {value: ", ".join(group) for value, group in names.items()}
