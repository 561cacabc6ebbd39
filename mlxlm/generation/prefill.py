"""Reading the prompts of a batch: what several begin with is read once, those of like length side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import PREFILL_STEP_SIZE, Context, common_prefix_length, eval_caches
from mlxlm.generation.running_batch import BatchRow

MAX_BATCH_TOKENS = 2048  # tokens of all rows in one forward pass: more make it no faster, and take more memory
MIN_SHARED_PREFIX = 16  # tokens: copying a cache costs about as much as reading so few


class Prefill:
    """Reads prompts, all but the last token of each, which the first step of decoding reads.

    What the last prompts had in common, a system prompt for example, is kept for the next ones.
    """

    def __init__(self, context: Context, on_read: Callable[[], None]):
        """`context`: an empty one of the batch's model. `on_read` is called whenever some tokens were read."""
        self._prefix, self._on_read = context, on_read

    def read(self, rows: Sequence[BatchRow]) -> Iterator[tuple[list[BatchRow], list]]:
        """Groups of `rows`, with the caches that hold their prompts side by side."""
        same: dict[tuple[int, ...], list[BatchRow]] = {}  # several samples of one prompt are read once
        for row in rows:
            same.setdefault(tuple(row.text.prompt[:-1]), []).append(row)
        for family, common in self._families(list(same)):
            self._read_prefix(common)
            start = len(common)
            for group in _groups(family, start):
                caches = self._read_group([list(ids) for ids in group], start)
                members = [row for ids in group for row in same[ids]]
                if len(members) > len(group):
                    copies = [i for i, ids in enumerate(group) for _ in same[ids]]
                    for cache in caches:
                        cache.select(copies)
                for ids in group:
                    for row, cached in zip(same[ids], chain([start], repeat(len(ids))), strict=False):
                        row.text.cached = cached
                yield members, caches

    def _families(self, prompts: list[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], list[int]]]:
        """Prompts by the tokens that they share at the beginning, with these. Those that share fewer than
        `MIN_SHARED_PREFIX` with any other come last, all together, with none."""
        alone, held = [], self._prefix.ids
        while prompts:
            first, *others = prompts
            alike = [common_prefix_length(first, other) for other in others]
            most = max([common_prefix_length(first, held), *alike])
            if most < MIN_SHARED_PREFIX:
                alone.append(first)
                prompts = others
                continue
            # Half as much in common is a family still: two prompts that begin alike by accident don't leave theirs.
            family = [other for other, n in zip(others, alike, strict=True) if 2 * n > most]
            prompts = [other for other, n in zip(others, alike, strict=True) if 2 * n <= most]
            yield [first, *family], list(first[: min((n for n in alike if 2 * n > most), default=most)])
            held = self._prefix.ids
        if alone:
            yield alone, []

    def _read_prefix(self, common: list[int]) -> None:
        if common:
            held = self._prefix.trim_to_prefix([*common, 0], 0)
            self._read_into(self._prefix, common[held:])

    def _read_into(self, context: Context, ids: list[int]) -> None:
        context.read(ids, on_prefill=lambda held: self._on_read())

    def _read_group(self, ids: Sequence[list[int]], start: int) -> list:
        """Caches with `ids`, of which the prefix holds the first `start`."""
        length = max(len(row) for row in ids) - start
        kept = [max(0, min(start, len(row) - length)) for row in ids]
        size = self._prefix.kv.size
        rows = [self._copy(n) for n in kept]
        if len(ids) == 1 or None in rows or size is not None and start + length > size:
            return _side_by_side([self._read_alone(row, start) for row in ids])
        caches = _side_by_side(rows)
        pads = [length - (len(row) - n) for row, n in zip(ids, kept, strict=True)]
        tokens = [[0] * pad + row[n:] for row, n, pad in zip(ids, kept, pads, strict=True)]
        if any(pads):
            for cache in caches:
                cache.set_left_padding(pads)
        columns = min(PREFILL_STEP_SIZE, max(_slack(length) + 1, MAX_BATCH_TOKENS // len(ids)))
        for first in range(0, length, columns):
            part = mx.array([row[first : first + columns] for row in tokens])
            # As in Context.read: the logits are never evaluated.
            self._prefix.model(part, cache=caches)
            eval_caches(caches)
            self._on_read()
        return caches

    def _read_alone(self, ids: list[int], start: int) -> list:
        context = Context(self._prefix.model, self._prefix.kv)
        if start:
            context.caches = [cache.copy() for cache in self._prefix.caches]
        self._read_into(context, ids[start:])
        return context.caches

    def _copy(self, n: int) -> list | None:
        """The prefix's caches with the first n tokens only; None where they can't be shortened to that."""
        if n == 0:
            return Context(self._prefix.model, self._prefix.kv).caches
        surplus = len(self._prefix) - n
        if not all(cache.can_trim(surplus) for cache in self._prefix.caches):
            return None
        copies = [cache.copy() for cache in self._prefix.caches]
        for cache in copies:
            cache.trim(surplus)
        return copies


def _side_by_side(rows: Sequence[list]) -> list:
    """Caches of several rows from those of each."""
    return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]


def _groups(prompts: Sequence[tuple[int, ...]], start: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts of nearly the same length, so many that the tokens from `start` on fit into a forward pass."""
    group: list[tuple[int, ...]] = []
    for ids in sorted(prompts, key=len, reverse=True):
        longest = len(group[0] if group else ids) - start
        many = (len(group) + 1) * min(longest, PREFILL_STEP_SIZE) > MAX_BATCH_TOKENS
        if group and (many or longest - (len(ids) - start) > _slack(longest)):
            yield group
            group = []
        group.append(ids)
    yield group


def _slack(length: int) -> int:
    """How much shorter than the longest, of `length`, a prompt of the same group may be."""
    return min(128, max(16, length // 4))
