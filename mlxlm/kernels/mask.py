"""Who sees whom in attention whose queries are the last T of S positions."""

from __future__ import annotations

from mlxlm.backend.mlx import mx


def relative_positions(T: int, S: int) -> mx.array:
    """A key's position minus the row's own, int `[T, S]`."""
    return mx.arange(S)[None] - mx.arange(S - T, S)[:, None]


def causal_mask(
    apart: mx.array,
    window: int | None,
    first: mx.array | None = None,
    segment_ids: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Whether a row sees a key at this `relative_positions`: its own and those before, with a window the last of these.

    `first` int `[B]`: the index of the first key that a batch entry has, the result being `[B, 1, T, S]`. Rows before
    it see themselves: a row that sees nothing would be NaN. `segment_ids` int `[B, T]` and `[B, S]`: the texts that the
    rows and the keys are of, the result being `[B, 1, T, S]` too; a row sees the keys of its own.
    """
    seen = apart <= 0
    if window is not None:
        seen = seen & (apart > -window)
    if segment_ids is not None:
        rows, keys = segment_ids
        seen = seen & (rows[:, None, :, None] == keys[:, None, None, :])
    if first is None:
        return seen
    return seen & ((mx.arange(apart.shape[1]) >= first[:, None, None, None]) | (apart == 0))
