"""A model's key-value caches together with the token ids that they hold."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import (
    PREFILL_STEP_SIZE,
    KVCache,
    KVOptions,
    fingerprint,
    make_cache,
    open_prompt_cache,
    save_prompt_cache,
)
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import CheckpointError

UNLIMITED = sys.maxsize  # tokens


class Context:
    """A model's key-value caches, one per layer, and `ids`, the tokens that they have read.

    The two agree whenever other code can see them: an exception in the middle of a change (Ctrl-C can raise anywhere)
    leaves an empty context.

    Attributes:
        model: The model.
        kv: The options of the caches.
        caches: The caches, one per layer.
    """

    def __init__(self, model: nn.Module, kv: KVOptions | None = None):
        """Make empty caches. Raises GenerationError for options that this model's caches don't support."""
        self.model, self.kv = model, kv or KVOptions()
        self.clear()

    @property
    def ids(self) -> list[int]:
        """All tokens that were read, including those that a rotating cache has dropped since."""
        return self._ids.tolist() if self._consistent else []

    def __len__(self) -> int:
        return len(self._ids) if self._consistent else 0

    def __bool__(self) -> bool:
        return True  # also for an empty context

    def clear(self) -> None:
        """Empty the context."""
        self._consistent = False
        self.caches = make_cache(self.model, self.kv)
        self._ids = array("i")
        self._consistent = True

    @contextmanager
    def transaction(self) -> Iterator[array[int]]:
        """Change caches and ids together or not at all. Yields the ids, to be changed in place."""
        self._consistent = False
        try:
            yield self._ids
        except BaseException:
            self.clear()
            raise
        self._consistent = True  # an interrupt just before this line leaves it False: the next use clears

    def set(self, caches: list[Any], ids: Sequence[int]) -> None:
        """Replace the content: `caches` hold exactly `ids`."""
        with self.transaction():
            self.caches, self._ids = caches, array("i", ids)

    @property
    def drops_tokens(self) -> bool:
        """Whether some layers drop tokens, so that the caches can't be trimmed to any length."""
        return any(
            not isinstance(cache, KVCache) or cache.rotation is not None or cache.window is not None
            for cache in self.caches
        )

    @property
    def max_update_size(self) -> int | None:
        """How many tokens fit before a rotating cache drops some; None if none ever does."""
        sizes = [getattr(cache, "max_update_size", None) for cache in self.caches]
        return min((size for size in sizes if size is not None), default=None)

    def trim_to_prefix(self, prompt: Sequence[int], length: int | None = None) -> int:
        """Trim the context to its longest common prefix with `prompt`, without the last token of `prompt`.

        That token must be read again for its logits. Caches that can't be trimmed this far (recurrent states, rotating
        caches and sliding windows that have dropped needed tokens) are emptied. So are those of "longrope" models with
        other factors than a text of this length has.

        Args:
            prompt: Token ids.
            length: Length of the text that will be read. Defaults to that of `prompt`.

        Returns:
            How many tokens of `prompt` the context holds.
        """
        if not self._consistent:
            self.clear()
        long_factors = self.has_long_factors(len(prompt) if length is None else length)
        if long_factors != self.long_factors:
            self.clear()
        shared = common_prefix_length(self._ids, prompt[:-1])
        surplus = len(self._ids) - shared
        if surplus and shared and all(can_trim(cache, surplus) for cache in self.caches):
            with self.transaction() as ids:
                for cache in self.caches:
                    cache.trim(surplus)
                del ids[shared:]
        elif surplus:
            self.clear()
        self.long_factors = long_factors
        return len(self._ids)

    def has_long_factors(self, length: int) -> bool:
        """Whether a text of this length has the factors for long texts of "longrope". It shares no keys with others."""
        original_length = getattr(self.model, "longrope_original_length", None)
        # With a rotating cache, no token attends further back than the cache reaches.
        return original_length is not None and min(length, self.kv.size or UNLIMITED) > original_length

    def reread_at(self, length: int) -> int:
        """The length at which a text, now of this one, has to be read again: its factors change there."""
        if self.has_long_factors(length) or not self.has_long_factors(UNLIMITED):
            return UNLIMITED
        return self.model.longrope_original_length + 1

    @property
    def long_factors(self) -> bool:
        """Whether the keys have the factors for long texts of "longrope"."""
        return getattr(self.caches[0], "long_factors", None) or False

    @long_factors.setter
    def long_factors(self, value: bool) -> None:
        if getattr(self.model, "longrope_original_length", None) is not None:
            for cache in self.caches:
                cache.long_factors = value

    def read(
        self,
        ids: Sequence[int],
        prefill_step_size: int = PREFILL_STEP_SIZE,
        *,
        wait: bool = True,
    ) -> None:
        """Append `ids` to the context, in chunks of at most `prefill_step_size` tokens.

        On a CPU each is evaluated before the next; a GPU computes one while the graph of the next is built.

        Args:
            ids: Token ids.
            prefill_step_size: The maximum number of tokens of a chunk.
            wait: Whether to wait for the last chunk.
        """
        done = 0
        while done < len(ids):
            # A chunk ends where a rotating cache drops tokens, so that what a token sees never depends on the chunks.
            size = min(prefill_step_size, len(ids) - done, self.max_update_size or prefill_step_size)
            chunk = list(ids[done : done + size])
            with self.transaction() as held_ids:
                # The logits are never evaluated, only the caches.
                self.model(mx.array([chunk]), cache=self.caches)
                eval_caches(self.caches, wait=wait and done + size == len(ids))
                held_ids.extend(chunk)
            done += size

    def save(self, path: Path | str, lm: LoadedModel, *, replace: bool = False) -> None:
        """Write caches and ids to a safetensors file, for `load` in another process.

        Args:
            path: The file.
            lm: This model with its tokenizer.
            replace: Overwrite a file that `save` has written.

        Raises:
            CheckpointError: If something else is at `path`, the context is empty, or this model's caches can't be
                written.
        """
        identity = cache_identity(lm, self.kv)
        if self.has_long_factors(UNLIMITED):
            identity["long_factors"] = str(self.long_factors)
        save_prompt_cache(path, self.caches, self.ids, identity, replace=replace)

    def load(self, path: Path | str, lm: LoadedModel) -> int:
        """Replace the content by that of a file that `save` has written.

        Returns:
            The number of tokens.

        Raises:
            CheckpointError: For a file that can't be read, or of another model, tokenizer or other cache options. The
                context stays as it is.
        """
        file = open_prompt_cache(path)
        for name, value in cache_identity(lm, self.kv).items():
            if file.identity.get(name) != value:
                what = f"to hold {file.identity.get(name)}, not {value}" if name == "cache" else f"with another {name}"
                raise CheckpointError(f"{path} was made {what}", "a new file, or what that one was made with")
        caches = make_cache(self.model, self.kv)
        file.load(caches)
        long_factors = file.identity.get("long_factors")
        if self.has_long_factors(UNLIMITED) and long_factors not in ("True", "False"):
            problem = f"{path} doesn't say which factors of longrope its keys have"
            raise CheckpointError(problem, "delete the file and create it again")
        self.set(caches, file.ids.tolist())
        self.long_factors = long_factors == "True"
        return len(self)


def cache_identity(lm: LoadedModel, kv: KVOptions) -> dict[str, str]:
    """What must be equal when a prompt cache file is saved and loaded."""
    tokens = "all tokens" if kv.size is None else f"{kv.size} tokens of which the first {kv.keep} stay"
    widths = (("keys", kv.key_bits), ("values", kv.value_bits))
    bits = ", ".join(f"{name} of {width} bits" for name, width in widths if width)
    return {
        "model": fingerprint(lm.model),
        "tokenizer": lm.tokenizer.fingerprint,
        "cache": f"{tokens}, {bits}" if bits else tokens,
    }


def can_trim(cache: Any, n: int) -> bool:
    """Whether a cache can drop its last n tokens. mlx_lm's caches only know whether they can be trimmed at all."""
    can_trim = getattr(cache, "can_trim", None)
    return cache.is_trimmable() if can_trim is None else can_trim(n)
