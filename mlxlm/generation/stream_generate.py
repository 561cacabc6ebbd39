"""Streaming generation: the text that follows a prompt, in chunks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation.context import Context
from mlxlm.generation.decoding import generate_tokens
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.request import Request
from mlxlm.generation.result import GenerationChunk, GenerationResult, SpeculationStats
from mlxlm.generation.sequence import TokenSequence
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


def generate(lm: LoadedModel, prompt: str | Sequence[int], **arguments: Any) -> GenerationResult:
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    text = stream(lm, prompt, **arguments)
    for _ in text:
        pass
    return text.result


def stream(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    context: Context | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Any,
) -> TextStream:
    """Continue `prompt`, in chunks.

    Args:
        lm: The model.
        prompt: Text, which is encoded with the tokenizer's special tokens (usually BOS in front) and never parsed for
            any; or token ids, which are used unchanged.
        context: A key-value cache to use and to keep for a later text. None for a new one.
        kv: Options of the new cache.
        speculation: Speculative decoding, which changes the speed and not the text.
        options: The fields of GenerationOptions.

    Returns:
        An iterator over chunks; its `result` is the whole text.

    Raises:
        GenerationError: Before anything is computed, for a prompt that is empty or longer than the context, and for
            invalid options.
    """
    settings = GenerationOptions.of(("context", "kv", "speculation"), **options)
    if context is None:
        context = Context(lm.model, kv)
    elif kv is not None and kv != context.kv:
        raise GenerationError(f"the context has its own cache settings, {context.kv}", "a context made with these")
    request = Request(encode_prompt(lm, prompt), settings)
    return TextStream(lm, request, context=context, speculation=speculation)


def encode_prompt(lm: LoadedModel, prompt: str | Sequence[int]) -> Sequence[int]:
    """Encode a prompt, unless it is token ids already. An empty text becomes BOS.

    Raises:
        GenerationError: For anything else, and for an empty text if the tokenizer has no BOS.
    """
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]  # also NumPy's integers
        except TypeError:
            raise GenerationError("the prompt is neither a text nor a list of ids", '"Once upon a time"') from None
    if prompt:
        return lm.tokenizer.encode(prompt)
    bos = lm.tokenizer.bos_id
    ids = lm.tokenizer.prefix_token_ids or ([] if bos is None else [bos])
    if not ids:
        raise GenerationError("the prompt is empty, and the model has no BOS token to begin with", "text to continue")
    return ids


class TextStream(Iterator[GenerationChunk]):
    """An iterator over the chunks of one text. `result` is the text so far."""

    def __init__(
        self,
        lm: LoadedModel,
        request: Request,
        *,
        context: Context | None = None,
        on_prefill: Callable[[int], None] | None = None,
        speculation: SpeculativeDecoder | None = None,
    ):
        """Prepare a text. Nothing is computed before the first chunk is requested.

        Args:
            lm: The model.
            request: The prompt and the options.
            context: See `stream`.
            on_prefill: See `generate_tokens`.
            speculation: See `stream`.

        Raises:
            GenerationError: As `stream`.
        """
        self._context = context or Context(lm.model)
        self._sequence = TokenSequence(lm, request, self._context.kv)
        if speculation is not None:
            if not hasattr(speculation, "check"):
                raise GenerationError(f"speculation is {speculation!r}", "SpeculativeDecoder(PromptLookup())")
            speculation.check(lm)
        self._speculation = speculation
        self._stats: SpeculationStats | None = None
        self._on_prefill = on_prefill
        self._chunks = self._generate_chunks()

    @property
    def seed(self) -> int:
        """The seed that the tokens are drawn with."""
        return self._sequence.seed

    def __next__(self) -> GenerationChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Stop here. The context then holds the prompt and every token of `result.tokens`."""
        self._chunks.close()

    @property
    def result(self) -> GenerationResult:
        """The text so far, with timings and statistics."""
        return self._sequence.result(self._stats)

    def _generate_chunks(self) -> Generator[GenerationChunk]:
        mx.reset_peak_memory()
        sequence, context = self._sequence, self._context
        sequence.start()
        # `generate_tokens` trims again, to no effect; the number is needed here, before `on_prefill` is called.
        sequence.num_cached = context.trim_to_prefix(sequence.prompt, sequence.limit)
        decode = generate_tokens if self._speculation is None else self._speculation.generate_tokens
        ids = decode(context, sequence.prompt, sequence.sampler, sequence.limit, on_prefill=self._on_prefill)
        if self._speculation is not None:
            self._stats = self._speculation.stats  # of this text; the next text gets its own
        try:
            for token in ids:
                chunk = sequence.push(token)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            ids.close()
