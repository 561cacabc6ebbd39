"""Text that follows a prompt, streamed in chunks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation.context import Context
from mlxlm.generation.decoding import generate_tokens
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.result import GenerationChunk, GenerationResult
from mlxlm.generation.sequence import TokenSequence
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


class TextStream(Iterator[GenerationChunk]):
    """An iterator over the chunks of one text; `result` tells what came of it so far."""

    def __init__(
        self,
        lm: LoadedModel,
        prompt: Sequence[int],
        options: GenerationOptions,
        *,
        context: Context | None = None,
        kv: KVOptions | None = None,
        eos_token_ids: frozenset[int] | None = None,
        on_prefill: Callable[[int], None] | None = None,
        speculation: SpeculativeDecoder | None = None,
    ):
        """Nothing is computed before the first chunk is asked for.

        `context` keeps its key-value cache for a later text; without one a fresh one is made, as `kv` says. `eos_token_ids`
        replace the model's end tokens. `on_prefill` is that of `generate_tokens`. `speculation` proposes tokens, which
        changes the speed and not the text.
        Raises GenerationError for an empty prompt, for one that leaves no room in the model's context, and for
        options that this model can't serve.
        """
        if context is not None and kv is not None and kv != context.kv:
            raise GenerationError(f"the context has its own cache settings, {context.kv}", "a context made with these")
        self._context = context or Context(lm.model, kv)
        self._sequence = TokenSequence(lm, prompt, options, self._context.kv, eos_token_ids)
        if speculation is not None:
            if not hasattr(speculation, "check"):
                raise GenerationError(f"speculation is {speculation!r}", "SpeculativeDecoder(PromptLookup())")
            speculation.check(lm)
        self._speculation, self._stats = speculation, None
        self._tokens = generate_tokens if speculation is None else speculation.tokens
        self._on_prefill = on_prefill
        self._chunks = self._run()

    @property
    def seed(self) -> int:
        """The one that the tokens are drawn with."""
        return self._sequence.seed

    def __next__(self) -> GenerationChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Leave the text here; the context then holds the prompt and every token of `result.tokens`."""
        self._chunks.close()

    @property
    def result(self) -> GenerationResult:
        return self._sequence.result(self._stats)

    def _run(self) -> Iterator[GenerationChunk]:
        mx.reset_peak_memory()
        sequence, context = self._sequence, self._context
        sequence.start()
        # `tokens` does it again, with nothing left to do: whoever is told of the prompt's reading asks for this number.
        sequence.cached = context.trim_to_prefix(sequence.prompt, sequence.limit)
        ids = self._tokens(context, sequence.prompt, sequence.sampler, sequence.limit, on_prefill=self._on_prefill)
        if self._speculation is not None:
            self._stats = self._speculation.stats  # this text's: the next one has others
        try:
            for token in ids:
                chunk = sequence.push(token)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            ids.close()


def stream(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    context: Context | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Any,
) -> TextStream:
    """Continue `prompt`; iterate over the Chunks as they come. `.result` of what is returned is the whole.

    A prompt in ids is taken as it is; text is encoded with the tokenizer's special tokens (usually BOS in
    front) and never parsed for any. `context`, `kv` and `speculation` are those of TextStream; `options` are the
    fields of GenerationOptions.
    Raises GenerationError before anything is computed: an empty prompt, one longer than the context,
    settings that can't work.
    """
    settings = GenerationOptions.of(("context", "kv", "speculation"), **options)
    return TextStream(lm, encode_prompt(lm, prompt), settings, context=context, kv=kv, speculation=speculation)


def generate(lm: LoadedModel, prompt: str | Sequence[int], **arguments: Any) -> GenerationResult:
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    text = stream(lm, prompt, **arguments)
    for _ in text:
        pass
    return text.result


def encode_prompt(lm: LoadedModel, prompt: str | Sequence[int]) -> Sequence[int]:
    """The ids of a prompt, which may be text; an empty one begins with BOS.

    Raises GenerationError where it is neither, and for an empty text where the tokenizer has no BOS."""
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]  # numpy's integers, too
        except TypeError:
            raise GenerationError("the prompt is neither a text nor a list of ids", '"Once upon a time"') from None
    if prompt:
        return lm.tokenizer.encode(prompt)
    bos = lm.tokenizer.bos_id
    ids = lm.tokenizer.prefix_token_ids or ([] if bos is None else [bos])
    if not ids:
        raise GenerationError("the prompt is empty, and the model has no BOS token to begin with", "text to continue")
    return ids
