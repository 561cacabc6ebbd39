"""Batched generation: as one row of a batch ends, the next request takes its place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.config.numbers import is_int_at_least
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import wired_limit
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.prefill import Prefill
from mlxlm.generation.request import Request
from mlxlm.generation.request_queue import RequestQueue
from mlxlm.generation.result import GenerationResult
from mlxlm.generation.running_batch import BatchRow, RunningBatch
from mlxlm.generation.sequence import TokenSequence
from mlxlm.generation.stream_generate import TextStream, encode_prompt
from mlxlm.utils.errors import GenerationError, MlxlmError

BATCH_SIZE = 32  # rows
_LOOKAHEAD = 4  # batches of requests to choose from, so that prompts of like length and beginning start together

Result = GenerationResult | MlxlmError


def batch(
    lm: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_samples: int = 1,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Any,
) -> list[GenerationResult]:
    """Continue every prompt `num_samples` times.

    The seed of a text is derived from `seed`, the number of its prompt (from 1, as the lines of `generate --jsonl`) and
    the number of the sample (from 0). The result reports it, and `generate` with it gives the same text.

    Args:
        lm: The model.
        prompts: Texts, or lists of token ids.
        num_samples: Texts per prompt.
        kv: Options of the key-value cache.
        batch_size: The maximum number of texts that are generated at once.
        options: The fields of GenerationOptions.

    Returns:
        The results of the first prompt, then those of the second, and so on.

    Raises:
        GenerationError: As `generate`, with the number of the prompt, before anything is computed.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise GenerationError("prompts is not a list of texts", '["Once upon a time", "The end"]')
    if not is_int_at_least(num_samples, 1):
        raise GenerationError(f"num_samples is {num_samples!r}", "a positive whole number, such as 4")
    context = Context(lm.model, kv)
    settings = GenerationOptions.of(("num_samples", "kv", "batch_size"), **options)
    settings = settings if settings.seed is not None else replace(settings, seed=random_seed())
    requests: list[Request] = []
    for number, prompt in enumerate(prompts, 1):
        try:
            request = Request(encode_prompt(lm, prompt), settings)
            request.check(lm, context.kv)
        except MlxlmError as error:
            raise type(error)(f"prompt {number}: {error.message}", error.hint) from error
        requests += [request.sample(str(number), sample) for sample in range(num_samples)]
    return list(ordered_results(run_batch(lm, requests, kv=kv, batch_size=batch_size)))


def run_batch(
    lm: LoadedModel,
    requests: Iterable[Request | None],
    *,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> Generator[tuple[int, Result], None, None]:
    """Yield the number (from 0) and the result of each request as it ends. Closing the generator is exact.

    A text is the one that its request gives alone, up to rounding: the logits of one row and of several differ in their
    last bits, and two tokens that are equally likely to that precision can change places. What several prompts begin
    with is read once. A model that doesn't support batching serves one request after another.

    Args:
        lm: The model.
        requests: Taken as they are needed, a few batches ahead. The iterable yields None if there is no request at the
            moment. It is then asked again after the next step, or at once if no text is being generated: then it
            should block.
        kv: Options of the key-value cache.
        batch_size: The maximum number of texts that are generated at once.
        on_progress: Called with the total number of generated tokens, after each step and while prompts are read.

    Yields:
        The number of the request, and its result. A request that can't be served has its error as result.

    Raises:
        GenerationError: For an invalid `batch_size` or `kv`.
    """
    if not is_int_at_least(batch_size, 1):
        raise GenerationError(f"batch_size is {batch_size!r}", "a positive whole number, such as 32")
    context = Context(lm.model, kv)
    queue = RequestQueue(requests, lambda request: request.check(lm, context.kv))
    num_generated = 0

    def count_tokens(more: int = 0) -> None:
        nonlocal num_generated
        num_generated += more
        on_progress(num_generated)

    if lm.supports_batching and batch_size > 1:
        return _run_rows(lm, context, queue, batch_size, count_tokens)
    return _run_sequentially(lm, context, queue, count_tokens)


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


def _run_sequentially(
    lm: LoadedModel, context: Context, queue: RequestQueue, count_tokens: Callable[..., None]
) -> Generator[tuple[int, Result], None, None]:
    """Serve one request after another with one context: a prefix shared with the last prompt isn't read again."""
    while not queue.exhausted:
        yield from queue.fill(1)
        for index, request in queue.take(1):
            try:
                text = TextStream(lm, request, context=context, on_prefill=lambda num_cached: count_tokens())
                for _ in text:
                    count_tokens(1)
                result: Result = text.result
            except MlxlmError as error:
                result = error
            yield index, result


def _run_rows(
    lm: LoadedModel, context: Context, queue: RequestQueue, batch_size: int, count_tokens: Callable[..., None]
) -> Generator[tuple[int, Result], None, None]:
    """Serve up to `batch_size` requests at once. `context` holds the prefix that prompts share."""
    rows = RunningBatch(lm.model, lm.config.max_position_embeddings)
    prefill = Prefill(context, count_tokens)
    mx.reset_peak_memory()
    with wired_limit():
        while rows.num_active or not queue.exhausted:
            yield from queue.fill(batch_size * _LOOKAHEAD)
            new_rows = []
            for index, request in queue.take(_num_admitted(len(queue), batch_size - rows.num_active, batch_size)):
                try:
                    text = TokenSequence(lm, request, context.kv)
                except MlxlmError as error:
                    yield index, error
                else:
                    new_rows.append(BatchRow(index, text))
            if new_rows or not rows.mostly_active:
                rows.remove_finished()
            if new_rows:
                rows.join(prefill.read(new_rows))
            if rows.num_active:
                num_tokens, finished = rows.step()
                count_tokens(num_tokens)
                yield from ((row.index, row.error or row.text.result()) for row in finished)


def _num_admitted(num_waiting: int, num_free: int, batch_size: int) -> int:
    """How many requests start now: since a start copies the caches of all rows, a backlog starts several at a time."""
    return 0 if num_free < num_waiting and num_free * 4 < batch_size else num_free
