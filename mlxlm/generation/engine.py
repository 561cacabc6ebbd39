"""The engine generates all texts of a model together; `run_batch` serves many requests with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from mlxlm.backend.error_text import device_error
from mlxlm.cache import KVOptions, PrefixCache, PrefixCacheFolder, make_cache
from mlxlm.config.numbers import is_int_at_least
from mlxlm.generation import device_thread
from mlxlm.generation.context import Context, cache_identity
from mlxlm.generation.kv_memory import KVMemory, StepMemory, default_max_kv_bytes
from mlxlm.generation.loaded_model import LoadedModel, eval_weights
from mlxlm.generation.prefill import Prefill
from mlxlm.generation.request import Request
from mlxlm.generation.result import GenerationResult
from mlxlm.generation.scheduler import Scheduler
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.generation.text import Text, TextStream
from mlxlm.generation.workers import EngineWorkers
from mlxlm.utils.errors import DeviceError, GenerationError, MemoryLimitError, MlxlmError, PromptTooLongError
from mlxlm.utils.formatting import human_bytes

BATCH_SIZE = 32  # texts that are decoded together
_MAX_ENGINES = 4  # of one model, with different settings; each keeps keys and values of earlier texts
_FOLDER_BYTES = 16 << 30
_ROTATING_TEXTS = 8  # kept of rotating caches, which are there to limit memory

_LOOKAHEAD = 5  # batches of requests to choose from, so that prompts of like length and beginning start together
_POLL_SECONDS = 0.05

Result = GenerationResult | MlxlmError
_compilers = ThreadPoolExecutor(1, thread_name_prefix="mlxlm-grammar")


class QueueFullError(GenerationError):
    """`max_waiting` texts are waiting already."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing, and what it has done so far.

    Attributes:
        running: Texts whose prompts are being read, or that are decoded.
        waiting: Texts that haven't begun.
        paused: Texts whose readers are far behind.
        generated_tokens: Tokens of all texts.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: How many of these the prefix cache had.
        kv_bytes: Bytes of the keys and values of running texts.
        prefix_cache_bytes: Bytes of the prefix cache.
    """

    running: int
    waiting: int
    paused: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    kv_bytes: int
    prefix_cache_bytes: int


class Engine:
    """Generates the texts of one model. Thread-safe.

        engine = Engine(lm)
        for chunk in engine.submit(Request(ids, GenerationOptions(max_tokens=50))):
            print(chunk.text, end="")

    Texts are decoded together: they begin and end at any time, and a long prompt is read in chunks between the steps of
    the others. A prompt that begins like an earlier text is read from where they differ. The text of a request depends
    on nothing but the request; on a GPU only if it is `deterministic`. All computation happens on one thread of the
    process, which all engines share.

    Args:
        lm: The model. Weights that `load` hasn't evaluated are evaluated with the first text.
        kv: Options of the key-value cache.
        batch_size: The maximum number of texts that are decoded at once.
        max_waiting: The maximum number of texts that wait for a free row. None for any number.
        prefix_cache_bytes: Keys and values of earlier texts to keep, as long as running texts don't need the memory; 0
            for none. None for all of `max_kv_bytes`, or a quarter if that is None, too; with a rotating cache, at most
            eight texts.
        prefix_cache_dir: A folder in which they survive a restart.
        max_kv_bytes: Bytes for the keys and values of running and earlier texts. None for three quarters of the
            memory, less the weights. Texts wait for free memory, and the youngest is interrupted if the others need
            more.
        speculation: Speculative decoding, while a few texts are running.

    Raises:
        GenerationError: For invalid settings, and options that this model's caches don't support.
    """

    def __init__(
        self,
        lm: LoadedModel,
        *,
        kv: KVOptions | None = None,
        batch_size: int = BATCH_SIZE,
        max_waiting: int | None = None,
        prefix_cache_bytes: int | None = None,
        prefix_cache_dir: Path | None = None,
        max_kv_bytes: int | None = None,
        speculation: SpeculativeDecoder | None = None,
    ):
        if not is_int_at_least(batch_size, 1):
            raise GenerationError(f"batch_size is {batch_size!r}", "a positive whole number, such as 32")
        if not isinstance(kv, KVOptions | None):
            raise GenerationError(f"kv is {kv!r}", "mlxlm.cache.KVOptions.of(size=1024, bits=8)")
        if prefix_cache_dir is not None:
            lm.check_whole("prefix cache on disk")
        if speculation is not None:
            lm.check_whole("speculative decoding")
            if not isinstance(speculation, SpeculativeDecoder):
                raise GenerationError(f"speculation is {speculation!r}", "SpeculativeDecoder(PromptLookup())")
            speculation.check(lm)
        self.lm = replace(lm)  # its own, so that a model and its engines are freed together
        self.kv = kv or KVOptions()
        self.batch_size, self._max_waiting, self._speculates = batch_size, max_waiting, speculation is not None
        limit = default_max_kv_bytes(lm) if max_kv_bytes is None else max_kv_bytes
        self._memory = KVMemory(lm, self.kv, limit if lm.workers is None else min(limit, lm.workers.max_kv_bytes))
        self._prefix_cache_bytes, self._is_limited = prefix_cache_bytes, max_kv_bytes is not None
        make_caches, folder = partial(make_cache, lm.model, self.kv), None
        if prefix_cache_dir is not None:
            identity = cache_identity(lm, self.kv)
            folder = PrefixCacheFolder(prefix_cache_dir, _FOLDER_BYTES, identity, make_caches)
        self._prefix_cache = PrefixCache(make_caches, self._max_prefix_bytes(), folder)
        self._scheduler = Scheduler(self.lm, self.kv, batch_size, self._prefix_cache, self._memory, speculation)
        self._lock = threading.Lock()
        self._inbox: deque[Text] = deque()
        self._num_compiling = 0
        self._scheduled = self._closed = self._has_evaluated = False
        self._num_failures = device_thread.num_failures
        self._workers: EngineWorkers | None = None
        if lm.workers is not None:
            self._workers = lm.workers.add_engine(self, kv=asdict(self.kv), batch_size=batch_size, limits=self.limits())

    def submit(self, request: Request, *, on_prefill: Callable[[int], None] | None = None) -> TextStream:
        """Begin to generate a text, and return at once.

        Args:
            request: The prompt and the options.
            on_prefill: Called with the number of prompt tokens read so far, while the stream is iterated.

        Raises:
            GenerationError: For a prompt or options that this model can't serve; PromptTooLongError for one that its
                context or memory has no room for, MemoryLimitError if memory may have room later. A constraint is
                compiled in the background: its errors are raised by the stream.
            QueueFullError: `max_waiting` texts wait.
        """
        if request.functions is not None and self._speculates:
            problem = "logits_processors and a sampler can't be combined with speculation"
            raise GenerationError(problem, "one of them")
        if request.functions is not None:
            self.lm.check_whole("logits_processors and a sampler")
        self._eval_weights()
        memory, length = self._memory, len(request.prompt)
        limit = memory.max_tokens(memory.max_bytes_alone)
        text = Text(self.lm, request, self.kv, limit)
        if length >= limit:
            problem = f"the prompt is too long: {length} tokens, and memory has room for {max(0, limit - 1)}"
            raise PromptTooLongError(problem, "fewer tokens, a larger `max_memory`, or `key_bits=8`")
        if memory.reserved_bytes(length) > memory.max_bytes:
            limit = memory.max_tokens(memory.max_bytes)
            problem = f"the prompt has {length} tokens; while other models are loaded, memory has room for {limit}"
            raise MemoryLimitError(problem, "again later")
        with self._lock:
            if self._closed:
                raise GenerationError("the engine is closed", "a new one")
            if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
                raise QueueFullError(f"{self._num_waiting} texts wait already", "again later")
            self._num_compiling += 1
        if request.options.constraint is None:
            self._enqueue(text)
        else:
            _compilers.submit(self._enqueue, text)
        return TextStream(text, on_prefill)

    @property
    def stats(self) -> EngineStats:
        """What the engine is doing, and what it has done so far."""
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.num_active,
            waiting=self._num_waiting,
            paused=scheduler.num_paused,
            generated_tokens=scheduler.num_generated,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            kv_bytes=scheduler.kv_bytes,
            prefix_cache_bytes=self._prefix_cache.nbytes,
        )

    def limit_memory(self, max_bytes: int, max_bytes_alone: int | None = None) -> None:
        """Limit what everything but the weights takes: keys and values, activations, scores and logits.

        Running texts that need more are interrupted until others have ended, or fail.

        Args:
            max_bytes: The limit.
            max_bytes_alone: The limit if no other model were loaded, by default the same. A prompt that needs more is
                refused for good.

        Raises:
            MemoryLimitError: They have no room for any text. Then nothing changes.
        """
        if self.lm.workers is not None:
            max_bytes = min(max_bytes, self.lm.workers.max_kv_bytes)
        shares, alone = (
            StepMemory.divide(self.lm, size, self.batch_size, Prefill.default_max_tokens(self.lm))
            for size in (max_bytes, max(max_bytes, max_bytes_alone or 0))
        )
        if shares.kv_bytes < self._memory.reserved_bytes(1):
            size = human_bytes(max(0, max_bytes))
            raise MemoryLimitError(f"{size} besides the weights have no room for any text", "more memory")

        def change() -> None:
            self._is_limited, self._memory.max_bytes_alone = True, alone.kv_bytes
            self._memory.max_bytes = shares.kv_bytes
            self.set_limits(shares.kv_bytes, shares.max_tokens, shares.score_bytes, self._max_prefix_bytes())
            if self._workers is not None:
                self._workers.limit(self.limits())

        device_thread.run(change)

    def limits(self) -> dict[str, int | None]:
        """The limits of memory that decide what a step does: arguments of `set_limits`."""
        scheduler, prefill = self._scheduler, self._scheduler.prefill
        return {
            "max_bytes": self._memory.max_bytes,
            "max_tokens": prefill.max_tokens,
            "max_score_bytes": prefill.max_score_bytes,
            "max_prefix_bytes": scheduler.max_prefix_bytes,
        }

    def set_limits(self, max_bytes: int, max_tokens: int, max_score_bytes: int | None, max_prefix_bytes: int) -> None:
        """Change `limits` between two steps."""
        scheduler, prefill = self._scheduler, self._scheduler.prefill
        self._memory.max_bytes, scheduler.max_prefix_bytes = max_bytes, max_prefix_bytes
        prefill.max_tokens, prefill.max_score_bytes = max_tokens, max_score_bytes
        scheduler.limit_prefix_cache()
        self._prefix_cache.evict(self._prefix_cache.max_bytes)

    def _max_prefix_bytes(self) -> int:
        if self._prefix_cache_bytes is not None:
            return min(self._prefix_cache_bytes, self._memory.max_bytes)
        size = self._memory.max_bytes if self._is_limited else self._memory.max_bytes // 4
        return size if self.kv.size is None else min(size, _ROTATING_TEXTS * self._memory.bytes_for(self.kv.size))

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Bytes of the keys and values of a text of this length."""
        return self._memory.bytes_for(num_tokens)

    def save_prefix(self, path: Path | str, ids: Sequence[int]) -> bool:
        """Write what is kept of the beginning of `ids` to a file. An existing one that this has written is replaced.

        Returns:
            Whether there is anything.

        Raises:
            CheckpointError: If something else is at `path`, it can't be written, or caches of this model can't.
        """
        self.lm.check_whole("prompt cache files")
        self._eval_weights()

        def save() -> bool:
            self._drop_lost_results()
            context = Context(self.lm.model, self.kv)
            group = context.has_long_factors(len(ids))
            if n := self._prefix_cache.match(ids, group):
                context.set(self._prefix_cache.restore(ids, n, group), ids[:n])
                context.long_factors = group
                context.save(path, self.lm, replace=True)
            return n > 0

        return device_thread.run(save)

    def load_prefix(self, path: Path | str) -> int:
        """Read a file that `save_prefix` has written, for prompts that begin as its text. Returns its tokens.

        Raises:
            CheckpointError: For a file that can't be read, or of another model, tokenizer or other cache options.
        """
        self.lm.check_whole("prompt cache files")
        self._eval_weights()

        def load() -> int:
            context = Context(self.lm.model, self.kv)
            context.load(path, self.lm)
            self._scheduler.limit_prefix_cache()
            self._prefix_cache.insert(context.ids, context.caches, context.long_factors)
            return len(context)

        return device_thread.run(load)

    def close(self) -> None:
        """Cancel all texts, and free the memory of keys and values. What isn't in `prefix_cache_dir` yet is written."""
        with self._lock:
            self._closed = True
            inbox, self._inbox = self._inbox, deque()
        closed = GenerationError("the engine was closed", "a new one")
        for text in inbox:
            text.fail(closed)

        def free() -> None:
            self._drop_lost_results()
            self._scheduler.fail_all(closed)
            self._prefix_cache.evict(0)

        device_thread.run(free)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eval_weights(self) -> None:
        """Evaluate the weights in the thread of the caller, which may have made them."""
        if not self._has_evaluated:
            eval_weights(self.lm.model)
            self._has_evaluated = True

    @property
    def _num_waiting(self) -> int:
        return self._num_compiling + len(self._inbox) + self._scheduler.num_waiting

    def _enqueue(self, text: Text) -> None:
        """Compile the constraint of a text, if it has one, and hand it over to the thread of the device."""
        failed = False
        try:
            text.prepare_sampler(self.lm)
        except Exception as error:
            failed = True
            text.fail(error)
        with self._lock:
            self._num_compiling -= 1
            if failed:
                return
            self._inbox.append(text)
        self._begin_steps()

    def _resume(self) -> None:
        """Resume a paused text. Takes no lock, because the garbage collector may call this at any time."""
        with suppress(RuntimeError):  # the process is ending
            device_thread.repeat(self._begin_steps)

    def _begin_steps(self) -> bool:
        """Start the steps on the thread of the device, unless they are running."""
        with self._lock:
            begins, self._scheduled = not self._scheduled, True
        if begins:
            device_thread.repeat(self._step)
        return False

    def _step(self) -> bool:
        self._drop_lost_results()
        with self._lock:
            new = list(self._inbox)
            self._inbox.clear()
        cancelled = [*self._scheduler.cancelled, *(text.number for text in new if text.cancelled)]
        if self._workers is not None:
            texts = [{"number": text.number, "limit": text.limit, "request": text.request.to_dict()} for text in new]
            if not self._workers.step(texts, cancelled):
                return False
        self._scheduler.waiting.extend(new)
        try:
            busy = self._scheduler.step(cancelled, self._resume if self._workers is None else None)
        except BaseException as error:
            if self._workers is not None:
                self._workers.fail(error)
            failure, busy = device_error(error), False
            if failure is not None and failure.results_lost:
                device_thread.num_failures += 1
            self._scheduler.fail_all(failure or error)
        with self._lock:
            self._scheduled = busy or bool(self._inbox)
            return self._scheduled

    def follow_step(self, new: Sequence[Text], cancelled: Collection[int]) -> None:
        """Take a step of the engine that has these new and cancelled texts, in another process of the model."""
        self._scheduler.waiting.extend(new)
        self._scheduler.step(cancelled)

    def _drop_lost_results(self) -> None:
        """If the device has failed meanwhile, in this engine or another: end all texts, and forget keys and values."""
        if self._num_failures != device_thread.num_failures:
            self._num_failures = device_thread.num_failures
            what = "the GPU failed while it computed another text"
            self._scheduler.fail_all(DeviceError(what, "again", out_of_memory=False, results_lost=True))
            self._prefix_cache.clear()


def get_engine(
    lm: LoadedModel,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    batch_size: int = BATCH_SIZE,
) -> Engine:
    """The engine of a model with these settings, which `generate`, `stream` and `batch` use.

    It lives as long as the model, so that later texts find what earlier ones have read.
    """
    key = (repr(kv), speculation, batch_size)
    if key not in lm.engines:
        engine = Engine(lm, kv=kv, speculation=speculation, batch_size=batch_size)
        while len(lm.engines) >= _MAX_ENGINES:
            del lm.engines[next(iter(lm.engines))]
        lm.engines[key] = engine
    return lm.engines[key]


def run_batch(
    engine: Engine,
    requests: Iterable[Request | None],
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> Generator[tuple[int, Result], None, None]:
    """Yield the number (from 0) and the result of each request as it ends. Closing the generator cancels the others.

    Args:
        engine: The engine. It decodes as many texts at once as its `batch_size`.
        requests: Taken as they are needed, a few batches ahead. The iterable yields None if there is no request at the
            moment. It is then asked again a little later, or at once if no text is being generated: then it should
            block.
        on_progress: Called several times a second with the number of tokens that were generated so far.

    Yields:
        The number of the request, and its result. A request that can't be served has its error as result.
    """
    source, ended = iter(requests), SimpleQueue[int]()
    streams: dict[int, TextStream] = {}
    num_generated, exhausted, number = 0, False, 0
    try:
        while streams or not exhausted:
            while not exhausted and len(streams) < engine.batch_size * _LOOKAHEAD:
                try:
                    request = next(source)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    break
                try:
                    streams[number] = engine.submit(request)
                    streams[number].add_done_callback(partial(ended.put, number))
                except MlxlmError as error:
                    yield number, error
                number += 1
            if not streams:
                continue
            finished = None
            with suppress(Empty):
                finished = ended.get(timeout=_POLL_SECONDS)
            on_progress(num_generated + sum(stream.num_generated for stream in streams.values()))
            if finished is None:
                continue
            stream = streams.pop(finished)
            num_generated += stream.num_generated
            try:
                yield finished, stream.result()
            except MlxlmError as error:
                yield finished, error
    finally:
        for stream in streams.values():
            stream.cancel()


def ordered_results(results: Iterable[tuple[int, Result]]) -> Iterator[GenerationResult]:
    """The results of `run_batch` in the order of their requests. Raises the first error as soon as it comes."""
    waiting: dict[int, GenerationResult] = {}
    next_index = 0
    for index, result in results:
        if isinstance(result, MlxlmError):
            raise result
        waiting[index] = result
        while next_index in waiting:
            yield waiting.pop(next_index)
            next_index += 1
