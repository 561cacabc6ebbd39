"""Checks of single numbers."""

from __future__ import annotations

from typing import Any

MAX_SIZE = 2**31 - 1  # sizes beyond this can't be array dimensions in MLX


def is_count(value: Any) -> bool:
    """Whether `value` is a positive whole number that can be an array dimension."""
    return is_int(value) and 0 < value <= MAX_SIZE


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether `value` is a positive number in the range of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3e38
