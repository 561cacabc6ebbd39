"""Text that follows a prompt: streamed in chunks, ended by a token, a stop string or a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mlxlm._mlx import mx
from mlxlm.errors import GenerationError
from mlxlm.generation.engine import Context, tokens
from mlxlm.generation.loaded import LoadedModel
from mlxlm.generation.sampling import Sampler, SamplingOptions, draw_seed
from mlxlm.generation.stops import StopStrings

FinishReason = Literal["stop", "eos", "length", "context"]


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """SamplingOptions, and where a text ends.

    max_tokens: at most this many tokens; None for as many as the model's context has room for.
    stop: strings that end the text and are not part of it.
    """

    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        super().__post_init__()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        limit = self.max_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            yield f"max_tokens is {limit!r} (a positive whole number, such as 256)"
        if any(not isinstance(stop, str) or not stop for stop in self.stop):
            yield "a stop string is empty (one character or more)"


@dataclass(frozen=True)
class Chunk:
    """What one token adds to the text: "" while a character or a stop string is undecided.

    `finish_reason` is set on the last chunk only.
    """

    text: str
    token: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of one text; None for what hasn't been measured yet.

    prompt_tokens_per_second counts the tokens that were read, not those already in the cache, up to the
    first new token; tokens_per_second the new tokens after the first. peak_memory_bytes is MLX's highest
    use meanwhile, weights included.
    """

    first_token_seconds: float | None
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class Result:
    """A text and how it came about.

    `tokens` are the ids generated, with the end token or the stop string's, if any. `finish_reason`:
    "eos" an end token, "stop" a stop string, "length" max_tokens, "context" the model's context is full,
    None if the text was left before its end. `cached_tokens` of the `prompt_tokens` didn't have to be read.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    seed: int
    timings: Timings


class TextStream(Iterator[Chunk]):
    """An iterator over the chunks of one text; `result` tells what came of it so far."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Sequence[int],
        options: GenerationOptions,
        *,
        context: Context | None = None,
        end_ids: frozenset[int] | None = None,
        on_prefill: Callable[[int], None] | None = None,
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
