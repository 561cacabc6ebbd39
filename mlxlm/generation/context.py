"""What a model has read: its key-value caches, and the ids of the tokens that they hold."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mlxlm.backend.mlx import ON_CPU, async_eval_arrays, eval_arrays, mx
from mlxlm.cache import (
    KVOptions,
    fingerprint,
    load_prompt_cache,
    load_prompt_cache_identity,
    make_cache,
    save_prompt_cache,
)
from mlxlm.utils.errors import CheckpointError, GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.loaded_model import LoadedModel

T = TypeVar("T")
UNLIMITED = sys.maxsize  # tokens: no limit
MAX_FREED_BYTES = (
    256 << 20
)  # that a CPU's allocator may keep; without a bound, 20,000 tokens leave 6 GB with a small model
PREFILL_STEP_SIZE = 512  # tokens; bounds the memory of a prompt's scores, [H, 512, S] a layer


class Context:
    """A model's key-value caches (one per layer) and `ids`, the tokens that they have read.

    The two agree at every moment that other code can see: an exception in the middle of a change (Ctrl-C strikes
    anywhere) leaves an empty context.
    """

    version = 0  # so many times it has become another

    def __init__(self, model, kv: KVOptions | None = None):
        """`kv`: how keys and values are kept (None: all, as they are).

        Raises GenerationError for what this model's caches can't do.
        """
        if not isinstance(kv, KVOptions | None):
            raise GenerationError(f"kv is {kv!r}", "mlxlm.cache.KVOptions.of(size=1024, bits=8)")
        self.model, self.kv = model, kv or KVOptions()
        self.clear()

    @property
    def ids(self) -> list[int]:
        """All tokens of the text that was read, also those that a rotating cache has dropped since."""
        return self._ids.tolist() if self._whole else []

    def __len__(self) -> int:
        """How many `ids` there are."""
        return len(self._ids) if self._whole else 0

    def __bool__(self) -> bool:
        """An empty one is a context, too."""
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._whole = False
        self.version += 1
        self.caches = make_cache(self.model, self.kv)
        self._ids = array("i")
        self._whole = True

    @contextmanager
    def transaction(self) -> Iterator[array]:
        """For changes that are made whole or not at all; gives the ids, to be changed with the caches."""
        self._whole = False
        self.version += 1
        try:
            yield self._ids
        except BaseException:
            self.clear()
            raise
        self._whole = True  # an interrupt just before leaves it unset: the next use begins anew

    def check_unchanged(self, since: int) -> None:
        """Raise GenerationError if another text has used the context after its first `since` `version`."""
        if self.version != since:
            raise GenerationError("the context was used for another text meanwhile", "a context for each text")

    @property
    def max_update_size(self) -> int | None:
        """How many tokens fit before a rotating cache drops some; None where none ever does."""
        rooms = [
            max_update_size
            for cache in self.caches
            if (max_update_size := getattr(cache, "max_update_size", None)) is not None
        ]
        return min(rooms, default=None)

    def trim_to_prefix(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Forget whatever `prompt` doesn't begin with; return how many of its tokens are held.

        At most `len(prompt) - 1`, since the last one must be read again for its logits. Caches that can't
        be shortened so far (recurrent states, rotations and windows that have dropped what would be needed) are
        emptied, and so are those whose positions are others in a text that will have `max_tokens` more ("longrope").
        """
        if not self._whole:
            self.clear()
        change = getattr(self.model, "longrope_original_length", None)
        if change is not None:
            # No token of a rotating cache sees one farther away than what that holds.
            expected_length = min(len(prompt) + max_tokens, self.kv.size or UNLIMITED)
            if self._ids and (expected_length > change) != (self.caches[0].expected_length > change):
                self.clear()
        kept = common_prefix_length(self._ids, prompt[:-1])
        surplus = len(self._ids) - kept
        if surplus and kept and all(_can_trim(cache, surplus) for cache in self.caches):
            with self.transaction() as ids:
                for cache in self.caches:
                    cache.trim(surplus)
                del ids[kept:]
        elif surplus:
            self.clear()
        if change is not None:
            for cache in self.caches:
                cache.expected_length = expected_length
        return len(self._ids)

    def read(
        self,
        ids: Sequence[int],
        prefill_step_size: int = PREFILL_STEP_SIZE,
        on_prefill: Callable[[int], None] | None = None,
    ) -> None:
        """Read `ids` behind what is held, in chunks of at most `prefill_step_size` tokens, each evaluated before the next.

        `on_prefill(n)` is told after each chunk how many tokens the context holds; an exception raised by it leaves
        the chunks that were read.
        """
        done = 0
        while done < len(ids):
            # A chunk ends where a rotating cache drops tokens: what a token sees never depends on the chunks.
            size = min(prefill_step_size, len(ids) - done, self.max_update_size or prefill_step_size)
            part = list(ids[done : done + size])
            with self.transaction() as held:
                # The logits of these positions are never evaluated: only the caches are.
                self.model(mx.array([part]), cache=self.caches)
                eval_caches(self.caches)
                held.extend(part)
            done += size
            if on_prefill is not None:
                on_prefill(len(self))

    def save(self, path: Path | str, lm: LoadedModel, *, replace: bool = False) -> None:
        """Write caches and ids to a safetensors file, for `load` in another process.

        `lm` is this model with its tokenizer. `replace`: the file may take the place of an earlier one of `save`.
        Raises CheckpointError if something else is there, if nothing was read yet, or if caches of this model's kind
        can't be written.
        """
        expected_length = getattr(self.caches[0], "expected_length", None)
        identity = self._identity(lm) | ({} if expected_length is None else {"expected_length": str(expected_length)})
        save_prompt_cache(path, self.caches, self.ids, identity, replace=replace)

    def load(self, path: Path | str, lm: LoadedModel) -> int:
        """Hold what a file of `save` has instead of what is held; return how many tokens that is.

        Raises CheckpointError for a file that can't be read, and for one of another model, another tokenizer or other
        cache settings; what was held stays then.
        """
        found = load_prompt_cache_identity(path)
        for name, wanted in self._identity(lm).items():
            if found.get(name) != wanted:
                what = f"to hold {found.get(name)}, not {wanted}" if name == "cache" else f"with another {name}"
                raise CheckpointError(f"{path} was made {what}", "a new file, or what that one was made with")
        caches = make_cache(self.model, self.kv)
        ids, _ = load_prompt_cache(path, caches)
        if getattr(self.model, "longrope_original_length", None) is not None:
            expected_length = found.get("expected_length", "")
            if not (expected_length.isdecimal() and len(expected_length) <= len(str(UNLIMITED))):
                problem = f"{path} doesn't say how long its text would become"
                raise CheckpointError(problem, "delete it and let it be written anew")
            for cache in caches:
                cache.expected_length = int(expected_length)
        with self.transaction():
            self.caches, self._ids = caches, array("i", ids)
        return len(self)

    def _identity(self, lm: LoadedModel) -> dict[str, str]:
        """What a file must have been made with."""
        kv = self.kv
        held = "all tokens" if kv.size is None else f"{kv.size} tokens of which the first {kv.keep} stay"
        bits = ", ".join(
            f"{name} of {bits} bits" for name, bits in (("keys", kv.key_bits), ("values", kv.value_bits)) if bits
        )
        return {
            "model": fingerprint(self.model),
            "tokenizer": lm.tokenizer.fingerprint,
            "cache": f"{held}, {bits}" if bits else held,
        }


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length, start, step = min(len(one), len(other)), 0, 16  # most that differ do so early
    while start < length:
        end = min(start + step, length)
        a, b = array("i", one[start:end]), array("i", other[start:end])
        if a != b:
            return start + next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        start, step = end, 2 * step
    return length


def _can_trim(cache, n: int) -> bool:
    """Caches of mlx_lm know only whether they can be trimmed at all."""
    can_trim = getattr(cache, "can_trim", None)
    return cache.is_trimmable() if can_trim is None else can_trim(n)


def async_eval(result: T) -> T:
    """The same array or arrays, with their computation begun."""
    async_eval_arrays(result)
    return result


def eval_caches(caches: Sequence, *more: mx.array) -> None:
    """Compute what `caches` hold, and `more`."""
    eval_arrays([cache.state for cache in caches], *more)
    clear_memory_cache()


def clear_memory_cache() -> None:
    """Give freed buffers back: attention over a growing cache frees ever new sizes, which pile up in the allocator.

    On a CPU only where there is more than a little, since fresh memory costs page faults there.
    """
    if not ON_CPU or mx.get_cache_memory() > MAX_FREED_BYTES:
        mx.clear_cache()
