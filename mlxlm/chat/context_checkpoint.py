"""A context that can go back to where the last question began, also where its caches have dropped tokens since."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxlm.cache import KVCache, KVOptions
from mlxlm.generation.context import PREFILL_STEP_SIZE, Context, common_prefix_length

_NEAR = 64  # tokens: so close before a mark, the mark is set early instead of reading them by themselves


class CheckpointedContext(Context):
    """Rotating caches and sliding windows can't be trimmed across what they dropped, and an answer is soon longer than
    that: a retry, an undo or a template that drops the answer's reasoning would have the whole conversation read again.
    So the layers that drop tokens are remembered as they are at a mark (arrays are shared until written to: no more
    than once again what those layers hold); all other layers are trimmed to it.

    checkpoint_at: where a mark is to be set in the next prompt, in tokens; None for nowhere.
    """

    def __init__(self, model, kv: KVOptions):
        self.checkpoint_at: int | None = None
        self._checkpoint: tuple[int, dict[int, KVCache]] | None = None  # tokens, and copies of layers
        super().__init__(model, kv)

    @property
    def drops_tokens(self) -> bool:
        """Whether layers drop tokens that this could remember; caches of mlx_lm's own kinds can't be."""
        return all(isinstance(cache, KVCache) for cache in self.caches) and any(map(_drops, self.caches))

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, those remembered included."""
        remembered = [] if self._checkpoint is None else self._checkpoint[1].values()
        return sum(cache.nbytes for cache in [*self.caches, *remembered])

    def clear(self) -> None:
        self._checkpoint = None
        super().clear()

    def trim_to_prefix(self, prompt: Sequence[int], max_tokens: int) -> int:
        if self._checkpoint is not None and len(self):
            common = common_prefix_length(self._ids, prompt[:-1])
            if common < self._checkpoint[0]:
                self._checkpoint = None
            elif not all(cache.can_trim(len(self) - common) for cache in self.caches):
                self._go_back(*self._checkpoint)
        return super().trim_to_prefix(prompt, max_tokens)

    def read(
        self,
        ids: Sequence[int],
        prefill_step_size: int = PREFILL_STEP_SIZE,
        on_prefill: Callable[[int], None] | None = None,
    ) -> None:
        missing = -1 if self.checkpoint_at is None else self.checkpoint_at - len(self)
        first = missing if missing > _NEAR else 0
        if first:
            super().read(ids[:first], prefill_step_size, on_prefill)
        if missing >= 0 and len(self):
            self._checkpoint = len(self), {n: cache.copy() for n, cache in enumerate(self.caches) if _drops(cache)}
        super().read(ids[first:], prefill_step_size, on_prefill)

    def _go_back(self, length: int, layers: dict[int, KVCache]) -> None:
        with self.transaction() as ids:
            for n, cache in enumerate(self.caches):
                if n in layers:
                    self.caches[n] = layers[n].copy()
                else:
                    cache.trim(len(ids) - length)
            del ids[length:]


def _drops(cache: KVCache) -> bool:
    return cache.rotation is not None or cache.window is not None
