"""Prefill: prompts are read in chunks, those of similar length side by side, from where the prefix cache ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import PREFILL_STEP_SIZE, KVOptions, PrefixCache
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.config import ModelConfig
from mlxlm.config.counts import attended_keys, forward_flops
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.kv_memory import prefill_step_size
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.text import Text

MAX_BATCH_TOKENS = 2048  # tokens of all rows in one forward pass: more isn't faster, and takes more memory
# Caches that can't be cut anywhere are kept after each of this many tokens of a prompt, where a later one may leave it.
SNAPSHOT_INTERVAL = 2048
MIN_SHARED_PREFIX = 16  # tokens: copying a cache costs about as much as reading this many

MIN_CHUNK_TOKENS = 32  # rows of a tile of MLX's quantized products; with fewer, reading the weights takes longer
_SCORE_BYTES = 8  # of a query and a key in each head: the score and its softmax, in float32
_UNKNOWN_CHUNK = 512  # of models whose products aren't counted
# Of attention's matrix products, the softmax between them included, relative to those of the layers' weights. Measured
# on a CPU with two cores; not measured on a GPU.
_ATTENTION_COST = 6 if ON_CPU else 1
# Products in the time in which a GPU reads a byte: 26 to 49 by the specifications of M1 to M5, 295 of an H100.
_FLOPS_PER_BYTE = 32 if mx.metal.is_available() else 256

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]
Group = tuple[list[Text], list[Any]]  # rows, and the stacked caches that hold all of their tokens but the last


class Prefill:
    """Reads the tokens of rows, except for the last ones, which the first decoding step reads.

    What the prefix cache holds is restored, and what was read is added to it.

    Args:
        lm: The model.
        kv: Options of the caches.
        prefix_cache: Keys and values of earlier texts.
        is_busy: Whether other texts wait for their next token, so that chunks should be small.

    Attributes:
        max_tokens: How many tokens of all rows are read in one forward pass.
        max_score_bytes: What the scores of attention may take, by smaller chunks of long prompts; None for any number.
    """

    def __init__(self, lm: LoadedModel, kv: KVOptions, prefix_cache: PrefixCache, is_busy: Callable[[], bool]):
        self._lm, self._model, self._kv, self._prefix_cache = lm, lm.model, kv, prefix_cache
        self._is_busy, self._weight_bytes = is_busy, lm.weight_bytes
        self.max_tokens = self.default_max_tokens(lm)
        self.max_score_bytes: int | None = None
        context = Context(lm.model, kv)
        # Caches that drop tokens can't be cut at the end of the prompt any more when the text ends.
        self._is_kept_at_end = not context.drops_tokens
        self._can_pad = all(getattr(cache, "can_pad", False) for cache in context.caches)

    @staticmethod
    def default_max_tokens(lm: LoadedModel) -> int:
        """How many tokens of all rows are read in one forward pass if memory isn't limited."""
        return MAX_BATCH_TOKENS if ON_CPU else prefill_step_size(lm)

    def read(self, rows: Sequence[Text]) -> Iterator[Group | None]:
        """Read the prompts of `rows` together.

        Yields:
            None after each chunk, and each group of rows that is ready, with its caches.
        """
        self._prefix_cache.evict(self._prefix_cache.max_bytes)
        by_prompt: dict[Tokens, list[Text]] = {}  # several samples of one prompt are read once
        for row in rows:
            by_prompt.setdefault(tuple(row.ids[:-1]), []).append(row)
        for prompts, prefix in self._split_by_prefix(list(by_prompt)):
            if prefix:
                yield from self._read_prefix(prefix)
            cached = {ids: self._prefix_cache.match(ids, False) for ids in prompts}
            for group in _split_by_length(prompts, cached, self._max_chunk_tokens(0)):
                caches = yield from self._read_group(group, cached)
                if len(group) > 1:
                    for i, ids in enumerate(group):
                        self._insert(ids, [cache.row(i) for cache in caches], False)
                members = [row for ids in group for row in by_prompt[ids]]
                if len(members) > len(group):
                    caches = [type(cache).merge([cache]) for cache in caches] if len(group) == 1 else caches
                    copies = [i for i, ids in enumerate(group) for _ in by_prompt[ids]]
                    for cache in caches:
                        cache.select(copies)
                for ids in group:
                    first, *others = by_prompt[ids]
                    first.set_num_cached(cached[ids])
                    for row in others:
                        row.set_num_cached(len(ids))
                yield members, caches

    def read_alone(self, row: Text, context: Context, isolated: bool = False) -> Iterator[Group | None]:
        """Read the prompt of one row to an empty context; yields as `read`.

        `isolated` reads all of it in chunks of a fixed size: keys and values of other chunks differ by rounding.
        """
        ids, snapshot_at = row.ids[:-1], row.request.snapshot_at
        group = context.has_long_factors(len(row))
        n = 0 if isolated else self._prefix_cache.match(ids, group)
        self._log_match(ids, n, group)
        context.set(self._prefix_cache.restore(ids, n, group, running=self._is_kept_at_end), ids[:n])
        context.long_factors = group
        row.set_num_cached(n)
        stops = [] if self._is_kept_at_end else sorted({snapshot_at or 0, *range(0, len(ids), SNAPSHOT_INTERVAL)})
        for stop in stops:
            if len(context) < stop < len(ids):
                yield from self._read_chunks(context, ids[len(context) : stop], row, isolated)
                self._prefix_cache.insert(context.ids, context.caches, group)
                yield None
        yield from self._read_chunks(context, ids[len(context) :], row, isolated)
        if ids:
            self._insert(ids, context.caches, group)
        row.reread_at = context.reread_at(len(row))
        yield [row], context.caches

    def _insert(self, ids: Sequence[int], caches: list[Any], group: bool) -> None:
        """Add a prompt to the prefix cache. Its text is generated with the same `caches`."""
        self._prefix_cache.insert(ids, caches, group, running=self._is_kept_at_end)

    def _read_chunks(
        self, context: Context, ids: Sequence[int], row: Text | None = None, isolated: bool = False
    ) -> Iterator[None]:
        """Read `ids`; yields after each chunk but the last."""
        while ids:
            size = min(PREFILL_STEP_SIZE, self.max_tokens if isolated else self._max_chunk_tokens(len(context)))
            context.read(ids[:size], size, wait=size >= len(ids))
            ids = ids[size:]
            if row is not None:
                row.report_read(len(context))
            if ids:
                yield

    def _max_chunk_tokens(self, num_read: int) -> int:
        """The maximum number of tokens of all rows in one forward pass, after `num_read` tokens of each row."""
        size = self.max_tokens
        if self._is_busy():
            size = min(size, chunk_size(self._lm.config, self._weight_bytes, num_read))
        if self.max_score_bytes is not None and isinstance(self._lm.config, ModelConfig):
            per_token = _SCORE_BYTES * self._lm.config.num_attention_heads * (num_read + PREFILL_STEP_SIZE)
            size = min(size, max(MIN_CHUNK_TOKENS, self.max_score_bytes // per_token))
        return size

    def _log_match(self, ids: Sequence[int], n: int, group: bool) -> None:
        """Log how much of a prompt is in the cache, and where it leaves the text that begins most like it."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        why = ""
        if difference := self._prefix_cache.first_difference(ids, group):
            position, *tokens = difference
            cached, new = (self._lm.tokenizer.decode([id], skip_special_tokens=False) for id in tokens)
            why = f"; token {position} is {new!r}, and {cached!r} in the text that begins most like it"
        logger.debug("%d of %d prompt tokens are in the prefix cache%s", n, len(ids), why)

    def _split_by_prefix(self, prompts: list[Tokens]) -> Iterator[tuple[list[Tokens], Tokens]]:
        """Yield prompts that share a prefix, with that prefix if the cache lacks some of it.

        Prompts that share fewer than `MIN_SHARED_PREFIX` tokens with any other come last, with an empty prefix.
        """
        unrelated = []
        while prompts:
            first, *others = prompts
            shared = [common_prefix_length(first, other) for other in others]
            longest = max(shared, default=0)
            if longest < MIN_SHARED_PREFIX:
                unrelated.append(first)
                prompts = others
                continue
            # Half of the longest prefix is enough: two prompts that begin alike by accident don't leave the others.
            related = [2 * n > longest for n in shared]
            group = [other for other, is_related in zip(others, related, strict=True) if is_related]
            prompts = [other for other, is_related in zip(others, related, strict=True) if not is_related]
            yield [first, *group], first[: min(n for n in shared if 2 * n > longest)]
        if unrelated:
            yield unrelated, ()

    def _read_prefix(self, prefix: Tokens) -> Iterator[None]:
        n = self._prefix_cache.match(prefix, False)
        if n < len(prefix):
            context = self._restore(prefix, n)
            yield from self._read_chunks(context, prefix[n:])
            self._prefix_cache.insert(prefix, context.caches, False, move=True)
            yield

    def _restore(self, ids: Tokens, n: int) -> Context:
        """A context with the first n tokens of `ids`, which the cache holds."""
        context = Context(self._model, self._kv)
        if n:
            context.set(self._prefix_cache.restore(ids, n, False), ids[:n])
        return context

    def _read_group(self, prompts: Sequence[Tokens], cached: dict[Tokens, int]) -> Generator[None, None, list[Any]]:
        """Read `prompts` from where the cache ends; returns stacked caches, and updates `cached`."""
        match = partial(self._prefix_cache.match, group=False)
        cached.update((ids, match(ids)) for ids in prompts)  # something may have been evicted since
        length = max(len(ids) - cached[ids] for ids in prompts)
        # A shorter prompt reads the end of what is cached again, rather than padding.
        reused = [max(0, min(cached[ids], len(ids) - length)) for ids in prompts]
        reused = [n if match(ids[:n]) == n else 0 for ids, n in zip(prompts, reused, strict=True)]
        max_size = self._kv.size
        too_long = max_size is not None and max(map(len, prompts)) > max_size
        padding = [length - (len(ids) - n) for ids, n in zip(prompts, reused, strict=True)]
        if len(prompts) == 1 or not self._can_pad or too_long or min(padding) < 0:
            rows = []
            for ids in prompts:
                context = self._restore(ids, cached[ids])
                yield from self._read_chunks(context, ids[cached[ids] :])
                self._insert(ids, context.caches, False)
                rows.append(context.caches)
                if len(prompts) > 1:
                    yield
            return _stack(rows)
        caches = _stack([self._restore(ids, n).caches for ids, n in zip(prompts, reused, strict=True)])
        tokens = [[0] * pad + list(ids[n:]) for ids, n, pad in zip(prompts, reused, padding, strict=True)]
        cached.update(zip(prompts, reused, strict=True))
        if any(padding):
            for cache in caches:
                cache.set_left_padding(padding)
        start = 0
        while start < length:
            max_tokens = self._max_chunk_tokens(max(reused) + start)
            step_size = min(PREFILL_STEP_SIZE, max(max(padding) + 1 - start, max_tokens // len(prompts), 1))
            # As in Context.read, the logits are never evaluated.
            self._model(mx.array([row[start : start + step_size] for row in tokens]), cache=caches)
            start += step_size
            eval_caches(caches, wait=start >= length)
            if start < length:
                yield
        return caches


def _stack(rows: Sequence[list[Any]]) -> list[Any]:
    """The caches of several rows, layer by layer, from those of each row."""
    if len(rows) == 1:
        return rows[0]
    return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]


def _split_by_length(prompts: Sequence[Tokens], cached: dict[Tokens, int], max_tokens: int) -> Iterator[list[Tokens]]:
    """Groups of prompts whose tokens that must be read are similarly many, and fit into one forward pass."""

    def unread(ids: Tokens) -> int:
        return len(ids) - cached[ids]

    group: list[Tokens] = []
    for ids in sorted(prompts, key=unread, reverse=True):
        longest = unread(group[0] if group else ids)
        too_many = (len(group) + 1) * min(longest, PREFILL_STEP_SIZE) > max_tokens
        if group and (too_many or longest - unread(ids) > _max_padding(longest)):
            yield group
            group = []
        group.append(ids)
    yield group


def _max_padding(length: int) -> int:
    """How much shorter than the longest prompt of a group, of `length` tokens, another one may be."""
    return min(128, max(16, length // 4))


def chunk_size(config: object, weight_bytes: int, num_read: int) -> int:
    """How many tokens of a prompt are read between two decoding steps of other texts.

    On a GPU as many as take the time of a decoding step, which reads the weights, so that the longest gap between two
    tokens of another text is that of two steps; but at least `MIN_CHUNK_TOKENS`. On a CPU, where small products are
    slow, as many as take the time of the first `PREFILL_STEP_SIZE` tokens.

    Args:
        config: The model's configuration. Those of other classes than `ModelConfig` get constant chunks.
        weight_bytes: Bytes of the weights.
        num_read: The number of tokens before the chunk.
    """
    if not isinstance(config, ModelConfig):
        return _UNKNOWN_CHUNK
    half = PREFILL_STEP_SIZE // 2  # of the chunk: the mean position in it
    budget = PREFILL_STEP_SIZE * _token_cost(config, half) if ON_CPU else _FLOPS_PER_BYTE * weight_bytes
    size = budget / _token_cost(config, num_read + (half if ON_CPU else 0))
    return max(MIN_CHUNK_TOKENS, min(int(size), PREFILL_STEP_SIZE))


def _token_cost(config: ModelConfig, position: int) -> float:
    flops = forward_flops(config, attended_keys(config, position))
    attention = flops.pop("scores") + flops.pop("scores_values")
    return sum(flops.values()) - flops["head"] + _ATTENTION_COST * attention
