"""Which tokens a cache drops: those of a rotating cache, and those before a sliding window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxlm.backend.mlx import mx
from mlxlm.cache.options import KVOptions
from mlxlm.config.counts import window_slack, window_spare

ShiftKeys = Callable[..., mx.array]  # (keys [B, H, n, D], offset, cache) -> the keys, moved by `offset` positions


@dataclass(frozen=True)
class RotationPolicy:
    """A rotating cache: a full cache drops the oldest `step` tokens after the first `keep` ones.

    What a token sees depends only on its position p (from 0): the first `keep` tokens and those from keep + d on,
    where d is the smallest multiple of `step` that is at least p + 1 - size (0 if p < size).

    Positions are those within the cache, as in StreamingLLM (Xiao et al. 2023, section 3.2): the first `keep` tokens
    (sinks) count as if they stood directly before the oldest of the others.

    Args:
        size: Maximum number of tokens.
        keep: Number of first tokens that are never dropped.
        shift_keys: Moves the keys of the sinks to their new positions. None leaves them as they are.
    """

    size: int
    keep: int
    shift_keys: ShiftKeys | None = None

    @property
    def step(self) -> int:
        """Tokens dropped at once: an eighth of what may go. It is also the prefill chunk size of a full cache."""
        return max(1, (self.size - self.keep) // 8)

    @property
    def num_retained(self) -> int:
        """Tokens that the buffers must have room for."""
        return self.size

    @property
    def extra_capacity(self) -> int:
        """Further positions, so that the tokens rarely move to the front of the buffers."""
        return self.step

    @property
    def min_tokens_to_trim(self) -> int:
        """Tokens that `trim` must leave if some were dropped: as many as were there right after the drop."""
        return self.size - self.step

    @property
    def max_positions(self) -> int:
        """The most positions that the buffers have, with those of the first tokens."""
        return self.size + self.step + self.keep

    def max_update_size(self, num_tokens: int) -> int:
        """How many tokens an update of a cache with `num_tokens` can add, with at most one drop before it."""
        return self.size - num_tokens if num_tokens < self.size else self.step


@dataclass(frozen=True)
class SlidingWindow:
    """The cache of a layer with sliding-window attention.

    A token sees itself and the `size` - 1 tokens before it. Older ones are dropped when the buffers move.

    Args:
        size: The window, in tokens.
        slack: At least this many of the last tokens can be trimmed.
    """

    size: int
    slack: int

    @classmethod
    def of(cls, size: int) -> SlidingWindow:
        """Make one with enough slack to trim an answer without another prefill."""
        return cls(size, window_slack(size))

    @property
    def num_visible(self) -> int:
        """Earlier tokens that the next token can see."""
        return self.size - 1

    @property
    def num_retained(self) -> int:
        """Tokens that are left after a drop."""
        return self.num_visible + self.slack

    @property
    def extra_capacity(self) -> int:
        """Further positions, so that the tokens rarely move to the front of the buffers."""
        return window_spare(self.size)

    @property
    def min_tokens_to_trim(self) -> int:
        """Tokens that `trim` must leave if some were dropped."""
        return self.num_visible

    @property
    def max_positions(self) -> int:
        """The most positions that the buffers have."""
        return self.num_retained + self.extra_capacity


def cache_policies(
    options: KVOptions, window: int | None, shift_keys: ShiftKeys | None = None
) -> tuple[RotationPolicy | None, SlidingWindow | None]:
    """The `rotation` and the `window` of the `KVCache` of a layer.

    A layer with a sliding window keeps the window, unless `options.size` is not larger.
    """
    if options.size is not None and (window is None or options.size <= window):
        return RotationPolicy(options.size, options.keep, shift_keys), None
    return None, None if window is None else SlidingWindow.of(window)
