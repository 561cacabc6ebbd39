"""Text that follows a prompt: streamed in chunks, ended by a token, a stop string or a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlxlm._mlx import mx
from mlxlm.errors import GenerationError
from mlxlm.generation.context import Context
from mlxlm.generation.engine import tokens
from mlxlm.generation.loaded import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.result import Chunk, FinishReason, Result, Timings
from mlxlm.generation.sampling import Sampler, draw_seed
from mlxlm.generation.stops import StopStrings

class TextStream(Iterator[Chunk]):
    """An iterator over the chunks of one text; `result` tells what came of it so far."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Sequence[int],
        options: GenerationOptions,
        *,
        context: Context | None = None,
        kv=None,
        end_ids: frozenset[int] | None = None,
        on_prefill: Callable[[int], None] | None = None,
        speculation=None,
    ):
        """Nothing is computed before the first chunk is asked for.

        `context` keeps its key-value cache for a later text; without one a fresh one is made. `end_ids`
        replace the model's end tokens. `on_prefill` is that of `engine.tokens`.
        Raises GenerationError for an empty prompt and for one that leaves no room in the model's context.
        """
        check_prompt(loaded, prompt)
        self.seed = draw_seed() if options.seed is None else options.seed
        self._options = options
        self._prompt = list(prompt)
        self._context = context or Context(loaded.model)
        self._cached = 0
        room = loaded.config.max_position_embeddings - len(self._prompt)
        self._limit = room if options.max_tokens is None else min(room, options.max_tokens)
        self._end_ids = loaded.end_ids if end_ids is None else end_ids
        self._decoder = loaded.tokenizer.stream()
        self._stops = StopStrings(options.stop)
        self._on_prefill = on_prefill
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._started = self._first = self._last = None
        self._chunks = self._run()

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Leave the text here; the context then holds the prompt and every token of `result.tokens`."""
        self._chunks.close()

    @property
    def result(self) -> Result:
        return Result(
            text="".join(self._text),
            tokens=list(self._tokens),
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            finish_reason=self._finish_reason,
            seed=self.seed,
            timings=self._timings(),
        )

    def _run(self) -> Iterator[Chunk]:
        mx.reset_peak_memory()
        self._started = time.perf_counter()
        self._cached = self._context.keep_prefix(self._prompt, self._limit)
        sampler = Sampler(self._options, self._prompt, self.seed)
        ids = tokens(self._context, self._prompt, sampler, self._limit, on_prefill=self._on_prefill)
        try:
            for token in ids:
                self._last = time.perf_counter()
                self._first = self._first or self._last
                self._tokens.append(token)
                chunk = self._chunk(token)
                self._text.append(chunk.text)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            ids.close()

    def _chunk(self, token: int) -> Chunk:
        ended = token in self._end_ids
        text = "" if ended else self._stops.push(self._decoder.push(token))
        if ended:
            reason = "eos"
        elif len(self._tokens) == self._limit:
            reason = "length" if self._limit == self._options.max_tokens else "context"
        else:
            reason = None
        if reason:
            text += self._stops.push(self._decoder.finish())
            text += self._stops.rest()
        self._finish_reason = "stop" if self._stops.found else reason
        return Chunk(text, token, self._finish_reason)

    def _timings(self) -> Timings:
        peak = mx.get_peak_memory()
        if self._first is None:
            return Timings(None, None, None, peak)
        to_first = self._first - self._started
        decoding = self._last - self._first
        return Timings(
            first_token_seconds=to_first,
            prompt_tokens_per_second=(len(self._prompt) - self._cached) / to_first,
            tokens_per_second=(len(self._tokens) - 1) / decoding if decoding else None,
            peak_memory_bytes=peak,
        )


def check_prompt(loaded: LoadedModel, prompt: Sequence[int]) -> None:
    """Raise GenerationError for a prompt of no tokens, of unknown ones, or of too many."""
    if not len(prompt):
        raise GenerationError("the prompt is empty", "some text to continue")
    size, limit = loaded.config.vocab_size, loaded.config.max_position_embeddings
    if not all(0 <= token < size for token in prompt):
        raise GenerationError("the prompt has ids that this model doesn't have", f"ids from 0 to {size - 1}")
    if len(prompt) >= limit:
        raise GenerationError(
            f"the prompt has {len(prompt)} tokens, and the model's context of {limit} has no room for more",
            f"a prompt of at most {limit - 1} tokens",
        )


def stream(
    loaded: LoadedModel, prompt: str | Sequence[int], *, context: Context | None = None, kv=None, speculation=None,
    **options: Any,
) -> TextStream:  # fmt: skip
    """Continue `prompt`; iterate over the Chunks as they come. `.result` of what is returned is the whole.

    A prompt in ids is taken as it is; text is encoded with the tokenizer's special tokens (usually BOS in
    front) and never parsed for any. `options` are the fields of GenerationOptions.
    Raises GenerationError before anything is computed: an empty prompt, one longer than the context,
    settings that can't work.
    """
    settings = GenerationOptions.of(**options)
    ids = encoded(loaded, prompt)
    return TextStream(loaded, ids, settings, context=context, kv=kv, speculation=speculation)


def generate(
    loaded: LoadedModel, prompt: str | Sequence[int], *, context: Context | None = None, kv=None, speculation=None,
    **options: Any,
) -> Result:  # fmt: skip
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    text = stream(loaded, prompt, context=context, kv=kv, speculation=speculation, **options)
    for _ in text:
        pass
    return text.result


def encoded(loaded: LoadedModel, prompt: str | Sequence[int]) -> Sequence[int]:
    """The ids of a prompt that may be text."""
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        raise GenerationError("the prompt is empty", "some text to continue")
    return loaded.tokenizer.encode(prompt)
