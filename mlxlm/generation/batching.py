"""Many texts at once: as one row of a batch ends, the next request takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.cache.options import is_int_at_least
from mlxlm.generation.context import Context, common_prefix_length
from mlxlm.generation.decoding import wired_limit
from mlxlm.generation.gumbel_noise import derive_seed, random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.prefill import MIN_SHARED_PREFIX, Prefill
from mlxlm.generation.result import GenerationResult
from mlxlm.generation.running_batch import BatchRow, RunningBatch
from mlxlm.generation.sequence import TokenSequence, max_new_tokens_for
from mlxlm.generation.stream_generate import TextStream, encode_prompt
from mlxlm.utils.errors import GenerationError, MlxlmError

BATCH_SIZE = 32  # rows
_AHEAD = 4  # batches of requests to choose from, so that prompts of like length and beginning start together


@dataclass(frozen=True)
class Request:
    """One text to generate: the prompt's ids, its options, and end tokens that replace the model's."""

    prompt: Sequence[int]
    options: GenerationOptions
    eos_token_ids: frozenset[int] | None = None

    def sample(self, id: str, number: int) -> Request:
        """Sample `number`, from 0, of what is asked for as `id`: with a seed derived from that of its options."""
        seed = derive_seed(self.options.seed, id, number)
        return replace(self, options=replace(self.options, seed=seed))


def run_batch(
    lm: LoadedModel,
    requests: Iterable[Request | None],
    *,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, GenerationResult | MlxlmError]]:
    """The result of each of `requests`, with its number (from 0), as it ends; closing the generator is exact.

    `batch_size` texts at most grow side by side. What the prompts of several begin with is read once. A text is the
    one that its request gives alone, as far as rounding goes: logits of one row and of several differ in their last
    bits, and two tokens that are as likely to that precision can change places. A model that can't be batched
    (`lm.supports_batching`) takes one request after another.

    Requests are asked for as they are needed, some batches ahead. An iterable that has none for now, and may have
    later, gives None; it is asked again after the next step, or at once where no text is growing: then it should wait.
    A request that can't be served has its error as result, as soon as it was asked for.
    `on_progress` is told how many tokens are generated, in all, as they are and as prompts are read.
    Raises GenerationError for a `batch_size` or a `kv` that can't work.
    """
    if not is_int_at_least(batch_size, 1):
        raise GenerationError(f"batch_size is {batch_size!r}", "a positive whole number, such as 32")
    context = Context(lm.model, kv)
    run = _Batch if lm.supports_batching and batch_size > 1 else _OneByOne
    queue = _Queue(requests, lambda request: _check(lm, request.prompt, request.options, context.kv))
    return run(lm, context, queue, batch_size, on_progress).run()


def _check(lm: LoadedModel, prompt: Sequence[int], options: GenerationOptions, kv: KVOptions) -> None:
    max_new_tokens_for(lm, prompt, kv)
    options.check_vocabulary(lm.config.vocab_size)


def batch(
    lm: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_samples: int = 1,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[GenerationResult]:
    """Continue every prompt `num_samples` times: the results of the first prompt, then those of the second, and so on.

    `options` are the fields of GenerationOptions. The seed of a text is derived from `seed`, the number of its prompt
    (from 1, as the lines of `generate --jsonl`) and that of the sample (from 0); its result tells it, and `generate`
    with it gives the same text. Raises GenerationError as `generate` does, before anything is computed, with the number
    of the prompt.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise GenerationError("prompts are no list of texts", '["Once upon a time", "The end"]')
    if not is_int_at_least(num_samples, 1):
        raise GenerationError(f"num_samples is {num_samples!r}", "a positive whole number, such as 4")
    context = Context(lm.model, kv)
    settings = GenerationOptions.of(("num_samples", "kv", "batch_size"), **options)
    settings = settings if settings.seed is not None else replace(settings, seed=random_seed())
    requests: list[Request] = []
    for number, prompt in enumerate(prompts, 1):
        try:
            ids = encode_prompt(lm, prompt)
            _check(lm, ids, settings, context.kv)
        except MlxlmError as error:
            raise type(error)(f"prompt {number}: {error.message}", error.hint) from error
        requests += [Request(ids, settings).sample(str(number), sample) for sample in range(num_samples)]
    return list(ordered_results(run_batch(lm, requests, kv=kv, batch_size=batch_size)))


def ordered_results(results: Iterable[tuple[int, GenerationResult | MlxlmError]]) -> Iterator[GenerationResult]:
    """Those of `run_batch` in the order of their requests. Raises the first error, as soon as it comes."""
    held: dict[int, GenerationResult] = {}
    following = 0
    for index, result in results:
        if isinstance(result, MlxlmError):
            raise result
        held[index] = result
        while following in held:
            yield held.pop(following)
            following += 1


class _Queue:
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
            alike = common_prefix_length(first, request.prompt)
            # By powers of two: among those that share a system prompt the length decides.
            rank = alike.bit_length() if alike >= MIN_SHARED_PREFIX else 0
            return -rank, abs(len(request.prompt) - len(first)), number

        self._queue.sort(key=distance)
        taken, self._queue = self._queue[:count], sorted(self._queue[count:], key=lambda item: item[0])
        return taken


class _Run:
    """What both ways of serving requests have in common."""

    def __init__(
        self,
        lm: LoadedModel,
        context: Context,
        queue: _Queue,
        batch_size: int,
        on_progress: Callable[[int], None],
    ):
        self._loaded, self._context, self._queue, self._size = lm, context, queue, batch_size
        self._on_progress = on_progress
        self._tokens = 0

    def _tell(self, more: int = 0) -> None:
        self._tokens += more
        self._on_progress(self._tokens)


class _OneByOne(_Run):
    """One request after another, over one context: what a prompt begins with like the one before isn't read again."""

    def run(self) -> Iterator[tuple[int, GenerationResult | MlxlmError]]:
        while not self._queue.over:
            yield from self._queue.fill(1)
            for index, request in self._queue.take(1):
                try:
                    result: GenerationResult | MlxlmError = self._text(request)
                except MlxlmError as error:
                    result = error
                yield index, result

    def _text(self, request: Request) -> GenerationResult:
        text = TextStream(
            self._loaded, request.prompt, request.options,
            context=self._context, eos_token_ids=request.eos_token_ids, on_prefill=lambda held: self._tell(),
        )  # fmt: skip
        for _ in text:
            self._tell(1)
        return text.result


class _Batch(_Run):
    """Rows side by side."""

    def run(self) -> Iterator[tuple[int, GenerationResult | MlxlmError]]:
        rows = RunningBatch(self._loaded.model, self._loaded.config.max_position_embeddings)
        prefill = Prefill(self._context, self._tell)
        mx.reset_peak_memory()
        with wired_limit():
            while rows.num_active or not self._queue.over:
                yield from self._queue.fill(self._size * _AHEAD)
                begun = []
                for index, text in self._next_texts(self._size - rows.num_active):
                    if isinstance(text, MlxlmError):
                        yield index, text
                    else:
                        text.start()
                        begun.append(BatchRow(index, text))
                if begun or not rows.mostly_active:
                    rows.remove_finished()
                if begun:
                    rows.join(prefill.read(begun))
                if not rows.num_active:
                    continue
                read, finished = rows.step()
                self._tell(read)
                for row in finished:
                    yield row.index, row.error or row.text.result()

    def _next_texts(self, free: int) -> Iterator[tuple[int, TokenSequence | MlxlmError]]:
        """Requests that begin now, at most `free`. The caches of all other rows are copied for it, so that where more
        are waiting some begin at a time."""
        if free < len(self._queue) and free * 4 < self._size:
            return
        for index, request in self._queue.take(free):
            try:
                text = TokenSequence(
                    self._loaded, request.prompt, request.options, self._context.kv, request.eos_token_ids
                )
            except MlxlmError as error:
                yield index, error
            else:
                yield index, text
