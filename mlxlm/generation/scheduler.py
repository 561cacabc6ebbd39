"""Which texts are read and decoded next, on the thread of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from mlxlm.backend.error_text import raise_if_results_lost
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, PrefixCache
from mlxlm.generation.batches import Batches
from mlxlm.generation.context import Context
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.decoding import generate_tokens
from mlxlm.generation.device_memory import clear_memory_cache, wired_limit
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.prefill import Group, Prefill
from mlxlm.generation.rounding import margin_for
from mlxlm.generation.row_queue import take_similar
from mlxlm.generation.running_batch import Row, RunningBatch
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.utils.errors import GenerationError

# Texts that are decoded one by one in turn: speculative and deterministic ones, and of models without batches.
MAX_SINGLE_ROWS = 4

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Reading:
    """Prompts that are being read, chunk by chunk. `steps` yields None, or rows that are ready to join the batch."""

    rows: list[Row]
    steps: Iterator[Group | None]


@dataclass(eq=False)
class _SingleRow:
    """A text that is decoded by itself."""

    row: Row
    context: Context
    tokens: Generator[int]


class Scheduler:
    """Reads prompts and decodes texts, a step at a time.

    A step reads at most one chunk of a prompt and decodes one token of every text, so that no text waits for longer
    than one chunk takes. The text of a reader who is far behind pauses: it frees its row, or if it is decoded by
    itself, isn't decoded.

    Attributes:
        waiting: Texts that haven't begun, or were interrupted because their memory was needed.
        paused: Texts that wait for their readers, except those that are decoded by themselves.
        num_generated: Tokens generated so far, of all texts.
        num_prompt_tokens: Tokens of all prompts so far.
        num_cached_tokens: How many of these the prefix cache had.
    """

    def __init__(
        self,
        lm: LoadedModel,
        kv: KVOptions,
        batch_size: int,
        prefix_cache: PrefixCache,
        memory: KVMemory,
        speculation: SpeculativeDecoder | None,
    ):
        self._lm, self._kv, self._speculation, self._margin = lm, kv, speculation, margin_for(kv)
        self._max_rows = batch_size if lm.supports_batching else min(batch_size, MAX_SINGLE_ROWS)
        self._prefix_cache, self._memory = prefix_cache, memory
        self._drops_tokens = Context(lm.model, kv).drops_tokens
        self._step = DecodeStep(lm.model)
        self._prefill = Prefill(lm, kv, prefix_cache, self._step, lambda: bool(self._batches.rows or self._singles))
        self.waiting: list[Row] = []
        self.paused: list[Row] = []
        self._reading: list[_Reading] = []
        self._singles: list[_SingleRow] = []
        self._batches = self._new_batches()
        self._while_busy = ExitStack()
        self._busy = False
        self.num_generated = self.num_prompt_tokens = self.num_cached_tokens = 0

    @property
    def num_active(self) -> int:
        """Texts whose prompts are being read, or that are decoded."""
        return sum(not row.channel.paused for row in self._running())

    @property
    def num_paused(self) -> int:
        """Texts that wait for their readers."""
        return len(self.paused) + len(self._running()) - self.num_active

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of running texts."""
        return self._batches.nbytes + sum(c.nbytes for single in self._singles for c in single.context.caches)

    def step(self, on_resume: Callable[[], None] = lambda: None) -> bool:
        """Read one chunk and decode one token of every text.

        Args:
            on_resume: Called when a text that has paused should go on, in any thread.

        Returns:
            Whether anything is left to do, other than to wait for readers.
        """
        if not self._busy:
            self._begin_work()
        self._resume_texts()
        self._drop_cancelled()
        self._pause_texts(on_resume)
        self._make_room()
        self._admit()
        was_active = self.num_active > 0
        if self._reading:
            self._read_chunk(self._reading[0])
        self.num_generated += self._batches.step(self._keep_prefix, self._free_bytes())
        self._decode_singles()
        # Texts that could not begin beside others can once one of these has ended, not while all of them pause.
        self._busy = self.num_active > 0 or bool(self.waiting) and (was_active or not self._singles)
        if not self._busy:
            self._end_work()
        return self._busy

    def fail_all(self, error: BaseException) -> None:
        """End all texts with an error, and free their memory."""
        for row in [*self.waiting, *self.paused, *self._running()]:
            row.fail(error)
        self.waiting, self.paused, self._singles, self._reading = [], [], [], []
        self._batches, self._busy = self._new_batches(), False
        self._end_work()

    def _new_batches(self) -> Batches:
        context_length = self._lm.config.max_position_embeddings
        return Batches(partial(RunningBatch, self._step, context_length, self._margin), self._memory)

    def _is_isolated(self, row: Row) -> bool:
        """Whether a text must be read and decoded by itself to be the one that its request gives alone."""
        return self._margin is None and row.text.deterministic

    def _running(self) -> list[Row]:
        return [*self._batches.rows, *self._reading_rows(), *(s.row for s in self._singles if not s.row.finished)]

    def _reading_rows(self) -> list[Row]:
        return [row for reading in self._reading for row in reading.rows if not row.finished]

    def _begin_work(self) -> None:
        self._busy = True
        mx.reset_peak_memory()
        self._while_busy.enter_context(wired_limit())

    def _end_work(self) -> None:
        self._while_busy.close()
        clear_memory_cache()

    def _drop_cancelled(self) -> None:
        self.waiting = [row for row in self.waiting if not row.channel.cancelled]
        in_batches = set(self._batches.rows)
        for row in self._running():
            if row.channel.cancelled:
                row.finished = True
                if row in in_batches:
                    self._keep_prefix(row)
        self._reading = [r for r in self._reading if not all(row.finished for row in r.rows)]
        for single in [s for s in self._singles if s.row.finished]:
            self._end_single(single)

    def _resume_texts(self) -> None:
        self.waiting = [*(row for row in self.paused if not row.channel.paused), *self.waiting]
        self.paused = [row for row in self.paused if row.channel.paused]

    def _pause_texts(self, on_resume: Callable[[], None]) -> None:
        """Pause the texts whose readers are far behind. What is kept of a row's cache needn't be read again."""
        for row in self._batches.rows:
            if row.channel.pause_if_full(on_resume):
                self._keep_prefix(row)
                self.paused.append(self._batches.take_out(row))
        for single in self._singles:
            single.row.channel.pause_if_full(on_resume)

    def _make_room(self) -> None:
        """Interrupt the youngest texts while the others need their memory. They continue when there is room again.

        A text that has no others beside it fails, and so does one that must be decoded by itself.
        """
        while not self._fits():
            rows, singles = self._batches.rows, [s for s in self._singles if self._is_isolated(s.row)]
            singles = singles if self._lm.supports_batching else []  # of others, `KVMemory` only guesses the bytes
            if rows and len(self._running()) > 1:
                self.waiting.insert(0, self._batches.take_out(rows[-1]))
                continue
            limit = self._memory.max_tokens()
            problem = f"memory has room for the keys and values of {limit} tokens"
            error = GenerationError(problem, "--kv-bits 8", is_operator_hint=True)
            if not singles:
                for row in rows:
                    row.fail(error)
                return
            singles[-1].row.fail(error)
            self._end_single(singles[-1])

    def _fits(self, more: Sequence[Row] = ()) -> bool:
        """Whether memory has room for the running texts and `more`; makes that room in the prefix cache."""
        if (free := self._free_bytes(more)) < 0:
            self._batches.remove_finished()
            if (free := self._free_bytes(more)) < 0:
                return False
        self._prefix_cache.evict(min(self._prefix_cache.max_bytes, free))
        return True

    def _free_bytes(self, more: Sequence[Row] = ()) -> int:
        rows = [*more, *self._reading_rows(), *(single.row for single in self._singles)]
        needed = sum(self._memory.reserved_bytes(len(row.text)) for row in rows)
        return self._memory.max_bytes - needed - self._batches.reserved_bytes

    def _admit(self) -> None:
        if not self.waiting:
            return
        num_running, num_active = len(self._running()), self.num_active
        room = MAX_SINGLE_ROWS - sum(self._is_isolated(row) for row in self._running() if not row.channel.paused)
        ready: list[Row] = []
        blocked: list[Row] = []
        for row in self.waiting:
            isolated = self._is_isolated(row)
            room -= isolated
            (blocked if isolated and room < 0 else ready).append(row)
        count = _num_admitted(len(ready), self._max_rows - num_active, self._max_rows)
        if not count:
            return
        rows, ready = take_similar(ready, count)
        self.waiting = [*ready, *blocked]
        while rows and not self._fits(rows) and (num_running or len(rows) > 1):
            self.waiting.insert(0, rows.pop())
        single = not self._lm.supports_batching
        if self._speculation is not None and num_running + len(rows) <= MAX_SINGLE_ROWS:
            single = single or not self._batches.rows
        together = []
        for row in rows:
            row.text.start()
            by_itself = single or self._is_isolated(row)
            if by_itself or row.text.snapshot_at is not None and self._drops_tokens:
                self._reading.append(_Reading([row], self._read_single(row, by_itself)))
            else:
                together.append(row)
        if len(together) == 1:
            self._reading.append(_Reading(together, self._read_single(together[0], False)))
        elif together:
            self._reading.append(_Reading(together, self._prefill.read(together)))

    def _read_single(self, row: Row, single: bool) -> Iterator[Group | None]:
        """Read the prompt of one row, and decode the text by itself or in the batch."""
        context = yield from self._prefill.read_alone(row, self._is_isolated(row))
        if single:
            self._begin_single(row, context)
        else:
            yield [row], context.caches

    def _read_chunk(self, reading: _Reading) -> None:
        try:
            group = next(reading.steps)
        except StopIteration:
            self._reading.remove(reading)
            return
        except Exception as error:
            raise_if_results_lost(error)
            for row in reading.rows:
                row.fail(error)
            self._reading.remove(reading)
            return
        if group is None:
            self._reading = [*self._reading[1:], reading]  # the next one's turn
            return
        rows, caches = group
        active = [i for i, row in enumerate(rows) if not row.finished]
        if len(active) < len(rows) and active:
            for cache in caches:
                cache.select(active)
        if active:
            self._batches.join([rows[i] for i in active], caches)
        reading.rows = [row for row in reading.rows if row not in rows]
        for row in rows:
            self._count_prompt(row)

    def _count_prompt(self, row: Row) -> None:
        if not row.is_counted:
            row.is_counted = True
            self.num_prompt_tokens += len(row.text.prompt)
            self.num_cached_tokens += row.text.num_cached

    def _keep_prefix(self, row: Row) -> None:
        ids, caches = self._batches.row_caches(row)
        if ids and caches:
            self._prefix_cache.insert(ids, caches, False)

    def _begin_single(self, row: Row, context: Context) -> None:
        text = row.text
        self._count_prompt(row)
        if self._speculation is None or self._is_isolated(row):
            tokens = generate_tokens(context, text.ids, text.sampler, text.remaining)
        else:
            tokens = self._speculation.generate_tokens(context, text.ids, text.sampler, text.remaining)
            text.speculation = self._speculation.stats
        self._singles.append(_SingleRow(row, context, tokens))

    def _decode_singles(self) -> None:
        for single in [single for single in self._singles if not single.row.channel.paused]:
            try:
                token = next(single.tokens)
            except Exception as error:
                raise_if_results_lost(error)
                single.row.fail(error)
            else:
                self.num_generated += 1
                single.row.push(token)
            if single.row.finished:
                self._end_single(single)

    def _end_single(self, single: _SingleRow) -> None:
        self._singles.remove(single)
        single.tokens.close()
        context = single.context
        if ids := context.ids:
            self._prefix_cache.insert(ids, context.caches, context.long_factors)


def _num_admitted(num_waiting: int, num_free: int, batch_size: int) -> int:
    """How many texts start now: a backlog starts several at a time, whose prompts are read together."""
    return 0 if num_free < num_waiting and num_free * 4 < batch_size else max(0, min(num_free, num_waiting))
