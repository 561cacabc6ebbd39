"""Causal attention masks, where the T queries are the last of S positions."""

from __future__ import annotations

from mlxlm.backend.mlx import mx


def relative_positions(T: int, S: int) -> mx.array:
    """Return key position minus query position, int `[T, S]`."""
    return mx.arange(S)[None] - mx.arange(S - T, S)[:, None]


def causal_mask(
    distance: mx.array,
    window: int | None,
    first: mx.array | None = None,
    segment_ids: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Return which keys each query sees.

    Args:
        distance: `relative_positions`, int `[T, S]`.
        window: Sliding window: a query sees only the last `window` keys, including its own.
        first: int `[B]`, the index of the first key of each batch entry (after left padding). Queries before it see
            only themselves, since a query that sees nothing would give NaN.
        segment_ids: int `[B, T]` and `[B, S]`, the texts of the queries and the keys. A query sees keys of its text.

    Returns:
        bool `[T, S]`, or `[B, 1, T, S]` with `first` or `segment_ids`.
    """
    visible = distance <= 0
    if window is not None:
        visible = visible & (distance > -window)
    if segment_ids is not None:
        query_ids, key_ids = segment_ids
        visible = visible & (query_ids[:, None, :, None] == key_ids[:, None, None, :])
    if first is None:
        return visible
    return visible & ((mx.arange(distance.shape[1]) >= first[:, None, None, None]) | (distance == 0))
