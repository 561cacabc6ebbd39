"""`mlxlm.generate`, `stream`, `batch` and `batch_as_completed`: continue prompts, or answer conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlxlm.cache import KVOptions
from mlxlm.chat.chat_encoder import Messages, message_encoder
from mlxlm.config.numbers import is_int_at_least
from mlxlm.config.option import options_of
from mlxlm.generation import GenerationResult, LoadedModel, Request, TextStream, get_engine, run_batch
from mlxlm.generation.engine import BATCH_SIZE, Result
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.jsonl import EncodedPrompt
from mlxlm.generation.loaded_model import loaded
from mlxlm.generation.logit_filters import FilterOptions
from mlxlm.generation.options import OptionArguments
from mlxlm.generation.request import encode_prompt
from mlxlm.generation.sampling_functions import LogitsFunction, SamplerFunction, SamplingFunctions
from mlxlm.utils.errors import GenerationError, MlxlmError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder

Prompt = str | Sequence[int]


class _TextArguments(OptionArguments, total=False):
    chat_template: str | None
    kv: KVOptions | None
    logits_processors: Sequence[LogitsFunction]
    sampler: SamplerFunction | None


class StreamArguments(_TextArguments, total=False):
    """The keyword arguments of `stream` besides `messages`. A test compares them."""

    speculation: SpeculativeDecoder | None


class BatchArguments(_TextArguments, total=False):
    """The keyword arguments of `batch_as_completed` besides `messages`. A test compares them."""

    num_samples: int
    batch_size: int


def generate(
    lm: LoadedModel | str | Path,
    prompt: Prompt | None = None,
    *,
    messages: Messages | None = None,
    **arguments: Unpack[StreamArguments],
) -> GenerationResult:
    """Continue `prompt` or answer `messages`, to the end. Arguments and errors are those of `stream`."""
    return stream(lm, prompt, messages=messages, **arguments).result()


def stream(
    lm: LoadedModel | str | Path,
    prompt: Prompt | None = None,
    *,
    messages: Messages | None = None,
    chat_template: str | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    logits_processors: Sequence[LogitsFunction] = (),
    sampler: SamplerFunction | None = None,
    **options: Unpack[OptionArguments],
) -> TextStream:
    """Continue `prompt` or answer `messages`, in chunks.

    Several texts can be streamed at once, from any threads. What a prompt has in common with an earlier text isn't read
    again. The text of an answer is what the model wrote: reasoning is part of it, in its tags.

    Args:
        lm: The model, or its name, path or hub id. One that is given by name is loaded, and stays in memory until
            another one is named; to use several models, or one that changes on disk, `load` them.
        prompt: Text, which is encoded with the tokenizer's special tokens (usually BOS in front) and never parsed for
            any; or token ids, which are used unchanged.
        messages: Instead of a prompt, a conversation whose last message is the user's: {"role": ..., "content": ...}
            or `mlxlm.chat.messages.Message` each. The answer ends with an end token of the model or its template.
        chat_template: How `messages` become a prompt: "chatml", "llama3", "gemma", "plain", or a jinja file.
            By default, the model's own template.
        kv: Options of the key-value cache.
        speculation: Speculative decoding, which changes the speed and not the text.
        logits_processors: Functions of yours, with the signature of mlx_lm's: each gets the ids of prompt and text,
            int32 `[T]`, and the logits, `[1, V]`, and returns logits. They come before everything that the options do.
            A text with such functions is decoded by itself; they are called in the thread that computes, so evaluate
            (`mx.eval`) the arrays that they use.
        sampler: A function of yours that gets the log-probabilities, float32 `[1, V]`, and returns the token, an
            integer `[1]`, instead of the temperature, the filters and the draw.
        options: The fields of GenerationOptions.

    Returns:
        An iterator over chunks, also for `async for`; its `result()` is the whole text, as is `await wait()`.

    Raises:
        GenerationError: Before anything is computed, for a prompt or a conversation that is empty or longer than the
            context, for invalid messages and options, for `messages` without a chat template, and for functions with
            speculation, or a sampler with a constraint or an option that it replaces.
        TokenizerError: The chat template is broken, or refuses the conversation.
    """
    lm = loaded(lm)
    _check_one_of("prompt", prompt, messages, chat_template)
    encoded = _encoder(lm, messages, chat_template)(prompt if messages is None else messages)
    settings = lm.generation_options(tuple(stream.__kwdefaults__ or ()), **options)
    engine = get_engine(lm, kv, speculation)
    request = encoded.request(settings, sampling_functions(logits_processors, sampler, options))
    request.compile_grammar(lm)  # raises here, not when the stream is iterated
    return engine.submit(request)


def batch_as_completed(
    lm: LoadedModel | str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    messages: Sequence[Messages] | None = None,
    chat_template: str | None = None,
    num_samples: int = 1,
    kv: KVOptions | None = None,
    batch_size: int = BATCH_SIZE,
    logits_processors: Sequence[LogitsFunction] = (),
    sampler: SamplerFunction | None = None,
    **options: Unpack[OptionArguments],
) -> Iterator[tuple[int, GenerationResult]]:
    """Continue every prompt, or answer every conversation, `num_samples` times, and yield each text as it ends.

    The seed of a text is derived from `seed`, the number of its prompt (from 1, as the lines of `generate --jsonl`) and
    the number of the sample (from 0). The result reports it, and `generate` with it gives the same text. Closing the
    iterator cancels the texts that haven't ended.

    Args:
        lm: The model, or its name, as in `stream`.
        prompts: Texts, or lists of token ids.
        messages: Instead of prompts, a list of conversations, each as in `stream`.
        chat_template: See `stream`.
        num_samples: Texts per prompt.
        kv: Options of the key-value cache.
        batch_size: The maximum number of texts that are generated at once, by default 32.
        logits_processors: See `stream`.
        sampler: See `stream`.
        options: The fields of GenerationOptions.

    Yields:
        The index of the result in the list that `batch` returns, and the result.

    Raises:
        GenerationError: As `stream`, with the number of the prompt, before anything is computed.
        TokenizerError: As `stream`.
    """
    lm = loaded(lm)
    _check_one_of("prompts", prompts, messages, chat_template)
    kind, inputs = ("prompt", prompts) if messages is None else ("conversation", messages)
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise GenerationError("prompts is not a list of texts", '["Once upon a time", "The end"]')
    if not is_int_at_least(num_samples, 1):
        raise GenerationError(f"num_samples is {num_samples!r}", "a positive whole number, such as 4")
    engine, encode = get_engine(lm, kv, batch_size=batch_size), _encoder(lm, messages, chat_template)
    settings = lm.generation_options(tuple(batch_as_completed.__kwdefaults__ or ()), **options)
    settings = settings if settings.seed is not None else replace(settings, seed=random_seed())
    functions = sampling_functions(logits_processors, sampler, options)
    requests: list[Request] = []
    for number, one in enumerate(inputs, 1):
        try:
            request = encode(one).request(settings, functions)
            request.check(lm, engine.kv)
            request.compile_grammar(lm)
        except MlxlmError as error:
            raise error.prefixed(f"{kind} {number}") from error
        requests += [request.sample(str(number), sample) for sample in range(num_samples)]
    return _raise_errors(run_batch(engine, requests))


def batch(
    lm: LoadedModel | str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    messages: Sequence[Messages] | None = None,
    **arguments: Unpack[BatchArguments],
) -> list[GenerationResult]:
    """Continue every prompt, or answer every conversation, `num_samples` times.

    Arguments and errors are those of `batch_as_completed`.

    Returns:
        The results of the first prompt, then those of the second, and so on.
    """
    results = batch_as_completed(lm, prompts, messages=messages, **arguments)
    return [result for _, result in sorted(results, key=itemgetter(0))]


def _raise_errors(results: Iterator[tuple[int, Result]]) -> Iterator[tuple[int, GenerationResult]]:
    for index, result in results:
        if isinstance(result, MlxlmError):
            raise result
        yield index, result


def sampling_functions(
    logits_processors: Sequence[LogitsFunction], sampler: SamplerFunction | None, options: Mapping[str, Any]
) -> SamplingFunctions | None:
    """Return the caller's functions, None if there are none.

    Raises:
        GenerationError: They aren't functions, or the sampler replaces what one of the `options` sets.
    """
    replaced = [name for name in ("seed", *options_of(FilterOptions)) if options.get(name) is not None]
    if sampler is not None and replaced:
        raise GenerationError(f"a sampler replaces {', '.join(replaced)}", "a sampler alone, or logits_processors")
    return SamplingFunctions.of(logits_processors, sampler)


def _encoder(lm: LoadedModel, messages: object, chat_template: str | None) -> Callable[[Any], EncodedPrompt]:
    """A function that encodes a prompt, or a conversation if there are `messages`."""
    if messages is not None:
        return message_encoder(lm, chat_template, compile_now=True)
    return lambda prompt: EncodedPrompt(encode_prompt(lm, prompt))


def _check_one_of(name: str, prompt: object, messages: object, chat_template: str | None) -> None:
    if (prompt is None) == (messages is None):
        problem = f"there are {name} and messages" if prompt is not None else f"there is neither {name} nor messages"
        raise GenerationError(problem, "one of them")
    if messages is None and chat_template is not None:
        raise GenerationError("a chat template needs messages", '[{"role": "user", "content": "Hello!"}]')
