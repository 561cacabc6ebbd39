"""Predicates for single numbers from users and files."""

from __future__ import annotations

from typing import Any, TypeGuard

MAX_SIZE = 2**31 - 1  # largest array dimension in MLX


def is_int(value: Any) -> TypeGuard[int]:
    """Whether `value` is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_int_at_least(value: Any, minimum: int) -> TypeGuard[int]:
    """Whether `value` is an integer of at least `minimum`."""
    return is_int(value) and value >= minimum


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is an integer or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether `value` is a positive integer that can be an array dimension."""
    return is_int(value) and 0 < value <= MAX_SIZE


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether `value` is a positive number in the range of float32."""
    return is_number(value) and 0 < value < 3e38
