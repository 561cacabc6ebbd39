"""A context that can return to the start of the last question, even if its caches have dropped tokens since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxlm.cache import PREFILL_STEP_SIZE, KVCache, KVOptions
from mlxlm.generation.context import Context, common_prefix_length

_MIN_PREFILL = 64  # tokens; a checkpoint this close ahead is taken early, rather than read so few tokens by themselves


class CheckpointedContext(Context):
    """A context with one checkpoint, for rotating caches and sliding windows.

    These caches can't be trimmed across tokens that they dropped, and an answer soon is longer than that: a retry, an
    undo, or a template that drops the answer's reasoning would read the whole conversation again. The layers that drop
    tokens are therefore copied at the checkpoint (arrays are shared until written to, so this takes at most as much
    memory again as those layers hold); all other layers are trimmed to it.

    Attributes:
        checkpoint_at: Position in the next prompt, in tokens, at which to take a checkpoint; None for no checkpoint.
    """

    def __init__(self, model: Any, kv: KVOptions):
        self.checkpoint_at: int | None = None
        self._checkpoint: tuple[int, dict[int, KVCache]] | None = None  # tokens, and copies of layers
        super().__init__(model, kv)

    @property
    def drops_tokens(self) -> bool:
        """Whether some layers drop tokens and can be copied. mlx_lm's own kinds of caches can't."""
        return all(isinstance(cache, KVCache) for cache in self.caches) and any(map(_drops_tokens, self.caches))

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, the checkpoint included."""
        checkpoint = [] if self._checkpoint is None else self._checkpoint[1].values()
        return sum(cache.nbytes for cache in [*self.caches, *checkpoint])

    def clear(self) -> None:
        """Forget everything, the checkpoint included."""
        self._checkpoint = None
        super().clear()

    def trim_to_prefix(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Trim as `Context.trim_to_prefix` does, restoring the checkpoint where trimming alone can't."""
        if self._checkpoint is not None and len(self):
            common = common_prefix_length(self._ids, prompt[:-1])
            if common < self._checkpoint[0]:
                self._checkpoint = None
            elif not all(cache.can_trim(len(self) - common) for cache in self.caches):
                self._restore(*self._checkpoint)
        return super().trim_to_prefix(prompt, max_tokens)

    def read(
        self,
        ids: Sequence[int],
        prefill_step_size: int = PREFILL_STEP_SIZE,
        on_prefill: Callable[[int], None] | None = None,
    ) -> None:
        """Read as `Context.read` does, taking a checkpoint at `checkpoint_at`."""
        missing = -1 if self.checkpoint_at is None else self.checkpoint_at - len(self)
        first = missing if missing > _MIN_PREFILL else 0
        if first:
            super().read(ids[:first], prefill_step_size, on_prefill)
        if missing >= 0 and len(self):
            layers = {n: cache.copy() for n, cache in enumerate(self.caches) if _drops_tokens(cache)}
            self._checkpoint = len(self), layers
        super().read(ids[first:], prefill_step_size, on_prefill)

    def _restore(self, length: int, layers: dict[int, KVCache]) -> None:
        with self.transaction() as ids:
            for n, cache in enumerate(self.caches):
                if n in layers:
                    self.caches[n] = layers[n].copy()
                else:
                    cache.trim(len(ids) - length)
            del ids[length:]


def _drops_tokens(cache: KVCache) -> bool:
    return cache.rotation is not None or cache.window is not None
