"""What a cache drops when it is full, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.config import counts

ShiftKeys = Callable[..., mx.array]  # (keys [B, H, n, D], by, cache) -> the keys, `by` positions later


@dataclass(frozen=True)
class RotationPolicy:
    """At most `size` tokens are held. A full cache drops the oldest `step` behind the first `keep` ones.

    What a token sees is therefore a function of its position p (from 0) alone: with d the multiple of `step` that is
    the least from p + 1 - size on (0 below size), the first `keep` tokens and those from keep + d on.

    Distances are compact, as in StreamingLLM (Xiao et al. 2023, section 3.2): kept tokens count as if they stood
    directly before the oldest of the others, `shift_keys` giving their keys there. None leaves keys as they are.
    """

    size: int
    keep: int
    shift_keys: ShiftKeys | None = None

    @property
    def step(self) -> int:
        """An eighth of what may be dropped: prompts are read in pieces of this length once the cache is full."""
        return max(1, (self.size - self.keep) // 8)

    @property
    def held(self) -> int:
        """Tokens that the buffers are made for."""
        return self.size

    @property
    def extra_capacity(self) -> int:
        """Positions beside them, so that the tokens rarely move to the front of the buffers."""
        return self.step

    @property
    def min_tokens_to_trim(self) -> int:
        """Tokens that must be left once some were dropped: as many as the first token after that saw before it."""
        return self.size - self.step

    def max_update_size(self, held: int) -> int:
        """How many tokens a text of which `held` are held can take at once, dropping at most before the first."""
        return self.size - held if held < self.size else self.step


@dataclass(frozen=True)
class SlidingWindow:
    """A layer's own sliding window: a token sees itself and the `size` - 1 before it, the rest may go.

    It is dropped now and then, so that the last `slack` tokens at least can be trimmed away.
    """

    size: int
    slack: int

    @classmethod
    def of(cls, size: int) -> SlidingWindow:
        """With slack for an answer, which is taken back without reading the text again."""
        return cls(size, counts.window_slack(size))

    @property
    def seen(self) -> int:
        """Tokens that the next one can see."""
        return self.size - 1

    @property
    def held(self) -> int:
        """Tokens that are left where some are dropped."""
        return self.seen + self.slack

    @property
    def extra_capacity(self) -> int:
        """Positions beside them, so that the tokens rarely move to the front of the buffers."""
        return counts.window_spare(self.size)

    @property
    def min_tokens_to_trim(self) -> int:
        """Tokens that must be left once some were dropped."""
        return self.seen


@dataclass(frozen=True)
class Sink:
    """The kept tokens of a row as they were before it dropped any: turned from here each time, no error adds up."""

    keys: KVBuffer  # 1 row, `keep` positions
    values: KVBuffer

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.keys.arrays, *self.values.arrays]
