"""Many texts at once: as one row of a batch ends, the next request takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlm._mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.cache.options import is_whole
from mlxlm.errors import GenerationError, MlxlmError
from mlxlm.generation.context import Context, shared
from mlxlm.generation.engine import wired_memory
from mlxlm.generation.growing import GrowingText, check_prompt
from mlxlm.generation.loaded import LoadedModel
from mlxlm.generation.noise import derived_seed, draw_seed
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.prefill import WORTH_SHARING, Prefill
from mlxlm.generation.result import Result
from mlxlm.generation.rows import Row, Rows
from mlxlm.generation.text import TextStream, encoded

BATCH_SIZE = 32  # rows
_AHEAD = 4  # batches of requests to choose from, so that prompts of like length and beginning start together


@dataclass(frozen=True)
class Request:
    """One text to generate: the prompt's ids, its options, and end tokens that replace the model's."""

    prompt: Sequence[int]
    options: GenerationOptions
    end_ids: frozenset[int] | None = None


@dataclass(frozen=True)
class Progress:
    """A batch so far. `prompt_tokens` were read (what prompts share counts once), `tokens` generated; `working`
    requests have begun, `finished` have ended."""

    prompt_tokens: int = 0
    tokens: int = 0
    working: int = 0
    finished: int = 0


def run_batch(
    loaded: LoadedModel,
    requests: Iterable[Request | None],
    *,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[tuple[int, Result | MlxlmError]]:
    """The result of each of `requests`, with its number (from 0), as it ends; closing the generator is exact.

    `batch_size` texts at most grow side by side. What the prompts of several begin with is read once. A text is the
    one that its request gives alone, as far as rounding goes: logits of one row and of several differ in their last
    bits, and two tokens that are as likely to that precision can change places. A model that can't be batched
    (`loaded.batchable`) takes one request after another.

    Requests are asked for as they are needed, some batches ahead. An iterable that has none for now, and may have
    later, gives None; it is asked again after the next step, or at once where no text is growing: then it should wait.
    A request that can't be served has its error as result, as soon as it was asked for.
    Raises GenerationError for a `batch_size` or a `kv` that can't work.
    """
    if not is_whole(batch_size, 1):
        raise GenerationError(f"batch_size is {batch_size!r}", "a positive whole number, such as 32")
    context = Context(loaded.model, kv)
    run = _Batch if loaded.batchable and batch_size > 1 else _OneByOne
    waiting = _Waiting(requests, lambda request: _check(loaded, request.prompt, request.options, context.kv))
    return run(loaded, context, waiting, batch_size, on_progress or (lambda progress: None)).run()


def _check(loaded: LoadedModel, prompt: Sequence[int], options: GenerationOptions, kv: KVOptions) -> None:
    check_prompt(loaded, prompt, kv)
    options.check_vocabulary(loaded.config.vocab_size)


def batch(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    samples: int = 1,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[Result]:
    """Continue every prompt `samples` times: the results of the first prompt, then those of the second, and so on.

    `options` are the fields of GenerationOptions. The seed of a text is derived from `seed`, the number of its prompt
    (from 1, as the lines of `generate --jsonl`) and that of the sample (from 0); its result tells it, and `generate`
    with it gives the same text. Raises GenerationError as `generate` does, before anything is computed, with the number
    of the prompt.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise GenerationError("prompts are no list of texts", '["Once upon a time", "The end"]')
    if not is_whole(samples, 1):
        raise GenerationError(f"samples is {samples!r}", "a positive whole number, such as 4")
    context = Context(loaded.model, kv)
    settings = GenerationOptions.of(("samples", "kv", "batch_size"), **options)
    seed = draw_seed() if settings.seed is None else settings.seed
    requests: list[Request] = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encoded(loaded, prompt)
            _check(loaded, ids, settings, context.kv)
        except MlxlmError as error:
            raise type(error)(f"prompt {number}: {error.message}", error.hint) from error
        seeds = [derived_seed(seed, str(number), sample) for sample in range(samples)]
        requests += [Request(ids, replace(settings, seed=seed)) for seed in seeds]
    results: dict[int, Result] = {}
    for index, result in run_batch(loaded, requests, kv=kv, batch_size=batch_size):
        if isinstance(result, MlxlmError):
            raise result
        results[index] = result
    return [results[index] for index in range(len(requests))]


class _Waiting:
    """Requests that haven't begun, with their numbers."""

    def __init__(self, requests: Iterable[Request | None], check: Callable[[Request], None]):
        """`check` raises MlxlmError for a request that can't be served."""
        self._source = iter(requests)
        self._check = check
        self._drawn = 0
        self._queue: list[tuple[int, Request]] = []
        self._over = False

    def fill(self, most: int) -> list[tuple[int, MlxlmError]]:
        """Ask for requests until `most` wait, or there are none, for now or for good; return those that can't be
        served, with the reason."""
        refused: list[tuple[int, MlxlmError]] = []
        while not self._over and len(self._queue) + len(refused) < most:
            try:
                request = next(self._source)
            except StopIteration:
                self._over = True
                break
            if request is None:
                break
            try:
                self._check(request)
            except MlxlmError as error:
                refused.append((self._drawn, error))
            else:
                self._queue.append((self._drawn, request))
            self._drawn += 1
        return refused

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def over(self) -> bool:
        """Whether none waits and none will come."""
        return self._over and not self._queue

    def take(self, count: int) -> list[tuple[int, Request]]:
        """The one that has waited longest, and up to `count - 1` others that begin like it or are as long."""
        if not self._queue:
            return []
        first = self._queue[0][1].prompt

        def distance(item: tuple[int, Request]) -> tuple[int, int, int]:
            number, request = item
            alike = shared(first, request.prompt)
            # By powers of two: among those that share a system prompt the length decides.
            rank = alike.bit_length() if alike >= WORTH_SHARING else 0
            return -rank, abs(len(request.prompt) - len(first)), number

        self._queue.sort(key=distance)
        taken, self._queue = self._queue[:count], sorted(self._queue[count:], key=lambda item: item[0])
        return taken


class _Run:
    """What both ways of serving requests have in common."""

    def __init__(
        self,
        loaded: LoadedModel,
        context: Context,
        waiting: _Waiting,
        batch_size: int,
        on_progress: Callable[[Progress], None],
    ):
        self._loaded, self._context, self._waiting, self._size = loaded, context, waiting, batch_size
        self._on_progress = on_progress
        self._progress = Progress()

    def _tell(self, **more: int) -> None:
        now = self._progress
        self._progress = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})
        self._on_progress(self._progress)

    def _refused(self, most: int) -> Iterator[tuple[int, MlxlmError]]:
        """Ask for requests until `most` wait; those among them that can't be served."""
        for index, error in self._waiting.fill(most):
            self._tell(finished=1)
            yield index, error


class _OneByOne(_Run):
    """One request after another, over one context: what a prompt begins with like the one before isn't read again."""

    def run(self) -> Iterator[tuple[int, Result | MlxlmError]]:
        while not self._waiting.over:
            yield from self._refused(1)
            for index, request in self._waiting.take(1):
                self._tell(working=1)
                try:
                    result: Result | MlxlmError = self._text(request)
                except MlxlmError as error:
                    result = error
                self._tell(working=-1, finished=1)
                yield index, result

    def _text(self, request: Request) -> Result:
        def on_prefill(now: int) -> None:
            nonlocal held
            self._tell(prompt_tokens=now - (text.result.cached_tokens if held is None else held))
            held = now

        held: int | None = None
        text = TextStream(
            self._loaded, request.prompt, request.options,
            context=self._context, end_ids=request.end_ids, on_prefill=on_prefill,
        )  # fmt: skip
        for _ in text:
            self._tell(tokens=1)
        return text.result


class _Batch(_Run):
    """Rows side by side."""

    def run(self) -> Iterator[tuple[int, Result | MlxlmError]]:
        rows = Rows(self._loaded.model, self._loaded.config.max_position_embeddings)
        prefill = Prefill(self._context, lambda read: self._tell(prompt_tokens=read))
        mx.reset_peak_memory()
        with wired_memory():
            while rows.live or not self._waiting.over:
                yield from self._refused(self._size * _AHEAD)
                begun = []
                for index, text in self._next_texts(self._size - rows.live):
                    if isinstance(text, MlxlmError):
                        self._tell(finished=1)
                        yield index, text
                    else:
                        text.start()
                        begun.append(Row(index, text))
                if begun or not rows.mostly_used:
                    rows.compact()
                if begun:
                    self._tell(working=len(begun))
                    rows.join(prefill.read(begun))
                if not rows.live:
                    continue
                read, ended = rows.step()
                self._tell(tokens=read, working=-len(ended), finished=len(ended))
                for row in ended:
                    yield row.index, row.error or row.text.result()

    def _next_texts(self, free: int) -> Iterator[tuple[int, GrowingText | MlxlmError]]:
        """Requests that begin now, at most `free`. The caches of all other rows are copied for it, so that where more
        are waiting some begin at a time."""
        if free < len(self._waiting) and free * 4 < self._size:
            return
        for index, request in self._waiting.take(free):
            try:
                text = GrowingText(self._loaded, request.prompt, request.options, self._context.kv, request.end_ids)
            except MlxlmError as error:
                yield index, error
            else:
                yield index, text
