"""Continuous batching: which texts are read and decoded next, and with which others, on the thread of the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, PrefixCache
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation.batches import Batches
from mlxlm.generation.certainty import margin_for
from mlxlm.generation.context import Context
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.device_memory import clear_memory_cache, wired_limit
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.prefill import MIN_SHARED_PREFIX, Group, Prefill
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.generation.text import Text
from mlxlm.utils.errors import MemoryLimitError

# Texts that are decoded one by one in turn: speculative and deterministic ones, and of models without batches.
MAX_SINGLE_ROWS = 4


@dataclass(eq=False)
class _Reading:
    """Prompts that are being read, chunk by chunk.

    Attributes:
        rows: Their texts.
        steps: Yields None after a chunk, or texts that are ready to be decoded.
        single: Whether the only text is decoded by itself then.
        context: What was read so far, of a text that is read by itself.
    """

    rows: list[Text]
    steps: Iterator[Group | None]
    single: bool = False
    context: Context | None = None


class Scheduler:
    """Reads prompts and decodes texts, a step at a time.

    A step reads at most one chunk of a prompt and decodes one token of every text, or several of a speculative one, so
    that no text waits for longer than one chunk takes. The text of a reader who is far behind pauses: it frees its row,
    or if it is decoded by itself, isn't decoded.

    Attributes:
        prefill: Reads the prompts.
        max_prefix_bytes: How much the prefix cache may take of what the texts leave.
        waiting: Texts that are not running: they haven't begun, were interrupted because their memory was needed, must
            be read again, or pause.
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
        self._prefix_cache, self._memory, self.max_prefix_bytes = prefix_cache, memory, prefix_cache.max_bytes
        self._drops_tokens = Context(lm.model, kv).drops_tokens
        self._step = DecodeStep(lm.model)
        self.prefill = Prefill(lm, kv, prefix_cache, lambda: bool(self._batches.rows))
        self.waiting: list[Text] = []
        self._reading: list[_Reading] = []
        self._batches = self._new_batches()
        self._while_busy = ExitStack()
        self._busy = False
        self.num_generated = self.num_prompt_tokens = self.num_cached_tokens = 0

    @property
    def num_active(self) -> int:
        """Texts whose prompts are being read, or that are decoded."""
        return sum(not row.paused for row in self._running())

    @property
    def num_paused(self) -> int:
        """Texts that wait for their readers."""
        return sum(row.paused for row in [*self.waiting, *self._running()])

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a row, or for memory."""
        return sum(not row.paused for row in self.waiting)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of running texts."""
        return self._batches.nbytes

    @property
    def cancelled(self) -> list[int]:
        """The numbers of texts that their readers no longer want."""
        return [row.number for row in [*self.waiting, *self._running()] if row.cancelled]

    def step(self, cancelled: Collection[int] = (), on_resume: Callable[[], None] | None = None) -> bool:
        """Read one chunk and decode the next token of every text.

        Args:
            cancelled: The numbers of texts to end.
            on_resume: Called when a text that has paused should go on, in any thread. Without it, none pauses.

        Returns:
            Whether anything is left to do, other than to wait for readers.
        """
        if not self._busy:
            self._begin_work()
        self._drop(cancelled)
        if on_resume is not None:
            self._pause_texts(on_resume)
        self._make_room()
        self._admit()
        was_active = self.num_active > 0
        if self._reading:
            self._read_chunk(self._reading[0])
        self.num_generated += self._batches.step(self._keep_prefix, self._free_bytes())
        for row in self._batches.rows:
            if row.room == 0:  # its keys have the wrong factors of "longrope" from here on
                self._batches.take_out(row)
                self.waiting.insert(0, row)
        # Texts that had no room next to others can begin once one of these has ended, not while all of them pause.
        self._busy = self.num_active > 0 or self.num_waiting > 0 and (was_active or not self._running())
        if not self._busy:
            self._end_work()
        return self._busy

    def fail_all(self, error: BaseException) -> None:
        """End all texts with an error, and free their memory."""
        for row in [*self.waiting, *self._running()]:
            row.fail(error)
        self.waiting, self._reading = [], []
        self._batches, self._busy = self._new_batches(), False
        self._end_work()

    def _new_batches(self) -> Batches:
        return Batches(self._step, self._lm.config.max_position_embeddings, self._margin, self._memory)

    def _is_isolated(self, row: Text) -> bool:
        """Whether a text must be read and decoded by itself to be the one that its request gives alone."""
        return self._margin is None and row.deterministic

    def _is_single(self, row: Text) -> bool:
        """Whether a text must be decoded by itself."""
        return row.request.functions is not None or self._is_isolated(row)

    def _running(self) -> list[Text]:
        return [*self._batches.rows, *self._reading_rows()]

    def _reading_rows(self) -> list[Text]:
        return [row for reading in self._reading for row in reading.rows if not row.finished]

    def _begin_work(self) -> None:
        self._busy = True
        mx.reset_peak_memory()
        self._while_busy.enter_context(wired_limit())

    def _end_work(self) -> None:
        self._while_busy.close()
        clear_memory_cache()

    def _drop(self, cancelled: Collection[int]) -> None:
        self.waiting = [row for row in self.waiting if row.number not in cancelled]
        for row in self._batches.rows:
            if row.number in cancelled:
                row.finished = True
                self._keep_prefix(row)
        for row in self._reading_rows():
            row.finished = row.number in cancelled
        ended = [reading for reading in self._reading if all(row.finished for row in reading.rows)]
        self._reading = [reading for reading in self._reading if reading not in ended]
        for reading in ended:
            if reading.context is not None:
                self._insert(reading.context.ids, reading.context.caches)
        self._batches.remove_inactive()

    def _pause_texts(self, on_resume: Callable[[], None]) -> None:
        """Pause the texts whose readers are far behind. What is kept of a row's cache needn't be read again."""
        for row in self._batches.rows:
            if row.pause_if_full(on_resume) and not self._batches.is_single(row):
                self._interrupt(row)

    def _interrupt(self, row: Text) -> None:
        """Take a text out of its batch, until there is room for it again. What is kept of it needn't be read again."""
        self._move_to_prefix_cache(row)
        self.waiting.insert(0, row)

    def _make_room(self) -> None:
        """Interrupt the youngest texts while the others need their memory. They continue when there is room again.

        A text that must be decoded by itself fails, and so does one that runs alone, if memory was limited meanwhile.
        The prefix cache is limited to the remaining memory.
        """
        while not self._fits():
            isolated = [row for row in self._batches.rows if self._is_isolated(row)]
            others = [row for row in self._batches.rows if not self._is_isolated(row)]
            if others and len(self._running()) > 1:
                self._interrupt(others[-1])
                continue
            limit = self._memory.max_tokens(self._memory.max_bytes)
            problem = f"memory has room for the keys and values of {limit} tokens now"
            error = MemoryLimitError(problem, "again later")
            for row in isolated[-1:] or others:
                row.fail(error)
                self._move_to_prefix_cache(row)
            if not isolated:
                break
        self.limit_prefix_cache()
        self._prefix_cache.evict(self._prefix_cache.max_bytes)

    def _fits(self, more: Sequence[Text] = ()) -> bool:
        """Whether memory has room for the running texts and `more`."""
        if self._free_bytes(more) < 0:
            self._batches.remove_finished()
        return self._free_bytes(more) >= 0

    def _free_bytes(self, more: Sequence[Text] = ()) -> int:
        """Bytes that the running texts and `more` leave."""
        groups = [more, *([row for row in reading.rows if not row.finished] for reading in self._reading)]
        # Prompts that are read together may be padded to the longest.
        needed = sum(self._memory.reserved_bytes(max(map(len, rows)), len(rows)) for rows in groups if rows)
        return self._memory.max_bytes - needed - self._batches.reserved_bytes

    def limit_prefix_cache(self) -> None:
        """Leave the prefix cache what texts don't need."""
        self._prefix_cache.max_bytes = max(0, min(self.max_prefix_bytes, self._free_bytes()))

    def _admit(self) -> None:
        """Begin to read the prompts of waiting texts for which there are rows and memory."""
        if not self.num_waiting:
            return
        num_running, num_active = len(self._running()), self.num_active
        room = MAX_SINGLE_ROWS - sum(self._is_single(row) for row in self._running() if not row.paused)
        paused: list[Text] = []
        blocked: list[Text] = []
        ready: list[Text] = []
        for row in self.waiting:
            alone = self._is_single(row)
            room -= alone
            (paused if row.paused else blocked if alone and room < 0 else ready).append(row)
        count = _num_admitted(len(ready), self._max_rows - num_active, self._max_rows)
        if not count:
            return
        rows, ready = _take_similar(ready, count)
        self.waiting = [*paused, *ready, *blocked]
        while rows and not self._fits(rows) and (num_running or len(rows) > 1):
            self.waiting.insert(0, rows.pop())
        single = not self._lm.supports_batching
        if self._speculation is not None and num_running + len(rows) <= MAX_SINGLE_ROWS:
            single = single or not self._batches.has_shared
        together = [
            row
            for row in rows
            if not (single or self._is_single(row) or row.request.snapshot_at is not None and self._drops_tokens)
        ]
        groups = [[row] for row in rows if row not in together or len(together) == 1]
        if len(together) > 1:
            groups.append(together)
        # The newest begin at once: what the prefix cache has of them isn't evicted before.
        self._reading = [*(self._begin(group, single) for group in groups), *self._reading]
        self.limit_prefix_cache()

    def _begin(self, rows: list[Text], single: bool) -> _Reading:
        for row in rows:
            row.begin()
        if len(rows) > 1:
            return _Reading(rows, self.prefill.read(rows))
        context = Context(self._lm.model, self._kv)
        steps = self.prefill.read_alone(rows[0], context, self._is_isolated(rows[0]))
        return _Reading(rows, steps, single or self._is_single(rows[0]), context)

    def _read_chunk(self, reading: _Reading) -> None:
        try:
            group = next(reading.steps)
            if group is None:
                self._reading = [*self._reading[1:], reading]  # the next one's turn
                return
            rows, caches = group
            self._decode(rows, caches, reading.single)
        except Exception as error:
            self._step.raise_if_fatal(error)
            for row in reading.rows:
                row.fail(error)
            self._reading.remove(reading)
            return
        reading.rows = [row for row in reading.rows if row not in rows]
        if not reading.rows:
            self._reading.remove(reading)
        for row in rows:
            if not row.is_counted:
                row.is_counted = True
                self.num_prompt_tokens += len(row.prompt)
                self.num_cached_tokens += row.num_cached

    def _decode(self, rows: Sequence[Text], caches: list[Any], single: bool) -> None:
        active = [i for i, row in enumerate(rows) if not row.finished]
        if not active:
            return
        if len(active) < len(rows):
            for cache in caches:
                cache.select(active)
        drafting = None
        if single and self._speculation is not None and not self._is_isolated(rows[0]):
            drafting = self._speculation.begin(self._lm.model, self._kv, rows[0].ids)
            rows[0].speculation = drafting.stats
        self._batches.join([rows[i] for i in active], caches, single=single, drafting=drafting)

    def _keep_prefix(self, row: Text) -> None:
        """Keep keys and values of a text that has ended.

        Its row stays as long as others use its batch, since its removal copies these; unless memory has no room for a
        copy of its own.
        """
        if not self.max_prefix_bytes:
            return
        batch = self._batches.batch_of(row)
        if batch.active_rows and self._memory.bytes_for(len(row)) <= self._free_bytes():
            self._insert(*batch.row_caches(row))
        else:
            self._move_to_prefix_cache(row)

    def _move_to_prefix_cache(self, row: Text) -> None:
        self._insert(*self._batches.take_out(row))

    def _insert(self, ids: Sequence[int], caches: list[Any]) -> None:
        """Add a text that doesn't run to the prefix cache; empties `caches`."""
        self.limit_prefix_cache()
        if ids and caches:
            group = getattr(caches[0], "long_factors", None) or False
            self._prefix_cache.insert(ids, caches, group, move=True)


def _num_admitted(num_waiting: int, num_free: int, batch_size: int) -> int:
    """How many texts start now: a backlog starts several at a time, whose prompts are read together."""
    return 0 if num_free < num_waiting and num_free * 4 < batch_size else max(0, min(num_free, num_waiting))


def _take_similar(waiting: list[Text], count: int) -> tuple[list[Text], list[Text]]:
    """Choose up to `count` texts: the oldest, and those most like it in their beginning or length.

    Returns:
        Those, and the others in their order.
    """
    oldest = waiting[0].prompt

    def distance(index: int) -> tuple[int, int, int]:
        prompt = waiting[index].prompt
        shared = common_prefix_length(oldest, prompt)
        # By powers of two: among prompts with the same system prompt, the length decides.
        rank = shared.bit_length() if shared >= MIN_SHARED_PREFIX else 0
        return -rank, abs(len(prompt) - len(oldest)), index

    chosen = sorted(range(len(waiting)), key=distance)[:count]
    rest = sorted(set(range(len(waiting))) - set(chosen))
    return [waiting[i] for i in chosen], [waiting[i] for i in rest]
