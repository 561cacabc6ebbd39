"""Prefill of a batch: a shared prefix is read once, and prompts of similar length side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.generation.context import Context, common_prefix_length
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.running_batch import BatchRow

MAX_BATCH_TOKENS = 2048  # tokens of all rows in one forward pass: more isn't faster, and takes more memory
MIN_SHARED_PREFIX = 16  # tokens: copying a cache costs about as much as reading this many

Prompt = tuple[int, ...]  # without the last token, which the first decoding step reads


class Prefill:
    """Reads the prompts of rows, except for their last tokens, which the first decoding step reads.

    The prefix that the last prompts shared, such as a system prompt, is kept for the next ones.
    """

    def __init__(self, context: Context, on_read: Callable[[], None]):
        """Start with an empty `context`, for the shared prefix. `on_read` is called whenever tokens were read."""
        self._prefix, self._on_read = context, on_read

    def read(self, rows: Sequence[BatchRow]) -> Iterator[tuple[list[BatchRow], list[Any]]]:
        """Yield groups of `rows`, each with the stacked caches that hold its prompts."""
        by_prompt: dict[Prompt, list[BatchRow]] = {}  # several samples of one prompt are read once
        for row in rows:
            by_prompt.setdefault(tuple(row.text.prompt[:-1]), []).append(row)
        for prompts, prefix in self._split_by_prefix(list(by_prompt)):
            self._read_prefix(prefix)
            for group in _split_by_length(prompts, len(prefix)):
                caches = self._read_group([list(ids) for ids in group], len(prefix))
                members = [row for ids in group for row in by_prompt[ids]]
                if len(members) > len(group):
                    copies = [i for i, ids in enumerate(group) for _ in by_prompt[ids]]
                    for cache in caches:
                        cache.select(copies)
                for ids in group:
                    first, *others = by_prompt[ids]
                    first.text.num_cached = len(prefix)
                    for row in others:
                        row.text.num_cached = len(ids)
                yield members, caches

    def _split_by_prefix(self, prompts: list[Prompt]) -> Iterator[tuple[list[Prompt], list[int]]]:
        """Yield prompts that share a prefix, with that prefix.

        Prompts that share fewer than `MIN_SHARED_PREFIX` tokens with any other come last, with an empty prefix.
        """
        unrelated, cached = [], self._prefix.ids
        while prompts:
            first, *others = prompts
            shared = [common_prefix_length(first, other) for other in others]
            longest = max([common_prefix_length(first, cached), *shared])
            if longest < MIN_SHARED_PREFIX:
                unrelated.append(first)
                prompts = others
                continue
            # Half of the longest prefix is enough: two prompts that begin alike by accident don't leave the others.
            related = [2 * n > longest for n in shared]
            group = [other for other, is_related in zip(others, related, strict=True) if is_related]
            prompts = [other for other, is_related in zip(others, related, strict=True) if not is_related]
            yield [first, *group], list(first[: min((n for n in shared if 2 * n > longest), default=longest)])
            cached = self._prefix.ids
        if unrelated:
            yield unrelated, []

    def _read_prefix(self, prefix: list[int]) -> None:
        if prefix:
            num_cached = self._prefix.trim_to_prefix([*prefix, 0], 0)
            self._read_into(self._prefix, prefix[num_cached:])

    def _read_into(self, context: Context, ids: list[int]) -> None:
        context.read(ids, on_prefill=lambda num_tokens: self._on_read())

    def _read_group(self, prompts: Sequence[list[int]], start: int) -> list[Any]:
        """Stacked caches that hold `prompts`, which begin with the first `start` tokens of the prefix."""
        length = max(len(ids) for ids in prompts) - start
        # A shorter prompt reads the end of the prefix again, rather than padding.
        reused = [max(0, min(start, len(ids) - length)) for ids in prompts]
        max_size = self._prefix.kv.size
        too_long = max_size is not None and start + length > max_size
        if len(prompts) == 1 or too_long or not all(map(self._can_copy_prefix, reused)):
            return _stack([self._read_alone(ids, start) for ids in prompts])
        caches = _stack([self._copy_prefix(n) for n in reused])
        padding = [length - (len(ids) - n) for ids, n in zip(prompts, reused, strict=True)]
        tokens = [[0] * pad + ids[n:] for ids, n, pad in zip(prompts, reused, padding, strict=True)]
        if any(padding):
            for cache in caches:
                cache.set_left_padding(padding)
        step_size = min(PREFILL_STEP_SIZE, max(_max_padding(length) + 1, MAX_BATCH_TOKENS // len(prompts)))
        for first in range(0, length, step_size):
            chunk = mx.array([row[first : first + step_size] for row in tokens])
            # As in Context.read, the logits are never evaluated.
            self._prefix.model(chunk, cache=caches)
            eval_caches(caches)
            self._on_read()
        return caches

    def _read_alone(self, ids: list[int], start: int) -> list[Any]:
        context = Context(self._prefix.model, self._prefix.kv)
        if start:
            context.caches = [cache.copy() for cache in self._prefix.caches]
        self._read_into(context, ids[start:])
        return context.caches

    def _can_copy_prefix(self, n: int) -> bool:
        return n == 0 or all(cache.can_trim(len(self._prefix) - n) for cache in self._prefix.caches)

    def _copy_prefix(self, n: int) -> list[Any]:
        """Copies of the prefix's caches with the first n tokens only."""
        if n == 0:
            return Context(self._prefix.model, self._prefix.kv).caches
        copies = [cache.copy() for cache in self._prefix.caches]
        for cache in copies:
            cache.trim(len(self._prefix) - n)
        return copies


def _stack(rows: Sequence[list[Any]]) -> list[Any]:
    """The caches of several rows, layer by layer, from those of each row."""
    return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]


def _split_by_length(prompts: Sequence[Prompt], start: int) -> Iterator[list[Prompt]]:
    """Groups of prompts of similar length whose tokens from `start` on fit into one forward pass."""
    group: list[Prompt] = []
    for ids in sorted(prompts, key=len, reverse=True):
        longest = len(group[0] if group else ids) - start
        too_many = (len(group) + 1) * min(longest, PREFILL_STEP_SIZE) > MAX_BATCH_TOKENS
        if group and (too_many or longest - (len(ids) - start) > _max_padding(longest)):
            yield group
            group = []
        group.append(ids)
    yield group


def _max_padding(length: int) -> int:
    """How much shorter than the longest prompt of a group, of `length` tokens, another one may be."""
    return min(128, max(16, length // 4))
