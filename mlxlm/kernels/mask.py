"""Who sees whom in attention whose queries are the last T of S positions."""

from __future__ import annotations

from mlxlm._mlx import mx


def distance(T: int, S: int) -> mx.array:
    """A key's position minus the row's own, int `[T, S]`."""
    return mx.arange(S)[None] - mx.arange(S - T, S)[:, None]


def visible(apart: mx.array, window: int | None) -> mx.array:
    """Whether a row sees a key at this `distance`: its own and those before, with a window the last of these."""
    seen = apart <= 0
    return seen if window is None else seen & (apart > -window)
