"""Generating texts: one at once, one in chunks, or many, where the next request takes the place of a text that ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Unpack

from mlxlm.cache import KVOptions
from mlxlm.config.numbers import is_int_at_least
from mlxlm.generation.engine import BATCH_SIZE, Engine, get_engine
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import OptionArguments
from mlxlm.generation.request import Request, encode_prompt
from mlxlm.generation.result import GenerationResult
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.generation.text_stream import TextStream
from mlxlm.utils.errors import GenerationError, MlxlmError

_LOOKAHEAD = 5  # batches of requests to choose from, so that prompts of like length and beginning start together
_POLL_SECONDS = 0.05

Result = GenerationResult | MlxlmError


def generate(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    eos_token_ids: frozenset[int] | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Unpack[OptionArguments],
) -> GenerationResult:
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    return stream(lm, prompt, eos_token_ids=eos_token_ids, kv=kv, speculation=speculation, **options).result()


def stream(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    eos_token_ids: frozenset[int] | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Unpack[OptionArguments],
) -> TextStream:
    """Continue `prompt`, in chunks.

    Arguments, result and errors are those of `mlxlm.stream`. `eos_token_ids` are the tokens that end the text; None for
    the model's.
    """
    settings = lm.generation_options(("eos_token_ids", "kv", "speculation"), **options)
    engine = get_engine(lm, kv, speculation)
    request = Request(encode_prompt(lm, prompt), settings, eos_token_ids)
    request.compile_grammar(lm)  # raises here, not when the stream is iterated
    return engine.submit(request)


def batch(
    lm: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    eos_token_ids: frozenset[int] | None = None,
    num_samples: int = 1,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    **options: Unpack[OptionArguments],
) -> list[GenerationResult]:
    """Continue every prompt `num_samples` times.

    Arguments, result and errors are those of `mlxlm.batch`. `eos_token_ids` are the tokens that end a text; None for
    the model's.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise GenerationError("prompts is not a list of texts", '["Once upon a time", "The end"]')
    if not is_int_at_least(num_samples, 1):
        raise GenerationError(f"num_samples is {num_samples!r}", "a positive whole number, such as 4")
    engine = get_engine(lm, kv, batch_size=batch_size)
    settings = lm.generation_options(("eos_token_ids", "num_samples", "kv", "batch_size"), **options)
    settings = settings if settings.seed is not None else replace(settings, seed=random_seed())
    requests: list[Request] = []
    for number, prompt in enumerate(prompts, 1):
        try:
            request = Request(encode_prompt(lm, prompt), settings, eos_token_ids)
            request.check(lm, engine.kv)
            request.compile_grammar(lm)
        except MlxlmError as error:
            raise error.prefixed(f"prompt {number}") from error
        requests += [request.sample(str(number), sample) for sample in range(num_samples)]
    return list(ordered_results(run_batch(engine, requests)))


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
            if finished is not None:
                stream = streams.pop(finished)
                num_generated += stream.num_generated
                yield finished, _result(stream)
    finally:
        for stream in streams.values():
            stream.cancel()


def _result(stream: TextStream) -> Result:
    try:
        return stream.result()
    except MlxlmError as error:
        return error


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
