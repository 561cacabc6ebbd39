"""One text while it grows: what each token adds to it, when it ends, what is reported of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from io import StringIO

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.result import FinishReason, GenerationChunk, GenerationResult, Timings
from mlxlm.generation.sampling import Sampler
from mlxlm.generation.stop_strings import StopStrings
from mlxlm.utils.errors import GenerationError


class TokenSequence:
    """The same for a stream and for a row of a batch. `limit` is how many tokens it may have, `sampler` draws them.

    Nothing is computed here. What is kept for a token is its id, its text and its log-probability.
    """

    def __init__(
        self,
        lm: LoadedModel,
        prompt: Sequence[int],
        options: GenerationOptions,
        kv: KVOptions,
        eos_token_ids: frozenset[int] | None = None,
    ):
        """`eos_token_ids` replace the model's end tokens.

        Raises GenerationError for an empty prompt, one that leaves no room in the model's context, and for options
        that this model or its tokenizer can't serve.
        """
        self.prompt = list(prompt)
        room = max_new_tokens_for(lm, self.prompt, kv)
        options.check_vocabulary(lm.config.vocab_size)
        self.seed = random_seed() if options.seed is None else options.seed
        self.limit = room if options.max_tokens is None else min(room, options.max_tokens)
        self.cached = 0  # tokens of the prompt that didn't have to be read
        self._cut_off: FinishReason = "length" if self.limit == options.max_tokens else "context"
        self._eos_token_ids = lm.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.sampler = build_sampler(lm, self.prompt, options, self.seed, self._eos_token_ids)
        self._constrained = options.constraint is not None
        self._tokenizer, self._decoder = lm.tokenizer, lm.tokenizer.detokenizer()
        self._empty = True  # no token has added a byte yet
        self._stops = StopStrings(options.stop)
        self._text = StringIO()
        self._tokens = array("i")
        self._logprobs = None if options.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._started = self._first = self._last = None

    def __len__(self) -> int:
        """Tokens of the prompt and the text so far."""
        return len(self.prompt) + len(self._tokens)

    @property
    def remaining(self) -> int:
        """How many tokens it may still have."""
        return self.limit - len(self._tokens)

    def start(self) -> None:
        """The clock of the timings."""
        self._started = time.perf_counter()

    def push(self, token: int) -> GenerationChunk:
        """Add a token that `sampler` drew and observed. After a chunk with a `finish_reason` comes no other."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens.append(token)
        logprob = None
        if self._logprobs is not None:
            logprob = self.sampler.pop_logprobs().with_bytes(self._added_bytes)
            self._logprobs.append(logprob)
        ended = token in self._eos_token_ids
        self._empty = self._empty and (ended or not self._tokenizer.token_bytes(token))
        text = "" if ended else self._stops.push(self._decoder.add_token(token))
        if ended or self._constrained and self.sampler.finished:
            reason = "eos"
        elif self._constrained and self.sampler.error:
            reason = "constraint"
        elif len(self._tokens) >= self.limit:
            reason = self._cut_off
        else:
            reason = None
        if reason:
            text += self._stops.push(self._decoder.finalize())
            text += self._stops.flush()
        self._finish_reason = "stop" if self._stops.matched else reason
        self._text.write(text)
        return GenerationChunk(text, token, self._finish_reason, logprob)

    def result(self, speculation=None) -> GenerationResult:
        """What came of the text so far. `speculation`: its SpeculationStats."""
        return GenerationResult(
            text=self._text.getvalue(),
            tokens=self._tokens.tolist(),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            finish_reason=self._finish_reason,
            seed=self.seed,
            timings=self._timings(),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            constraint_error=self._constraint_error(),
            speculation=speculation,
        )

    def _added_bytes(self, token: int) -> bytes | None:
        """What a token adds to the text here; None where tokens aren't bytes."""
        if not self._tokenizer.has_byte_tokens:
            return None
        added = b"" if token in self._eos_token_ids else self._tokenizer.token_bytes(token)
        return added.removeprefix(b" ") if self._empty and self._tokenizer.strips_dummy_prefix else added

    def _constraint_error(self) -> str | None:
        if not self._constrained or self._finish_reason is None:
            return None
        cut = self._finish_reason == "stop"
        return self.sampler.constraint_error_of(self._text.getvalue()) if cut else self.sampler.constraint_error

    def _timings(self) -> Timings:
        peak = mx.get_peak_memory()
        if self._first is None:
            return Timings(None, None, None, peak)
        to_first = self._first - self._started
        decoding = self._last - self._first
        return Timings(
            time_to_first_token=to_first,
            prompt_tokens_per_second=(len(self.prompt) - self.cached) / to_first,
            tokens_per_second=(len(self._tokens) - 1) / decoding if decoding else None,
            peak_memory_bytes=peak,
        )


def build_sampler(
    lm: LoadedModel, prompt: Sequence[int], options: GenerationOptions, seed: int, eos_token_ids: frozenset[int]
) -> Sampler:
    """The sampler of one text. Raises GenerationError for a constraint that can't be served."""
    grammar = None
    if options.constraint is not None:
        from mlxlm.generation.constraint import Grammar

        grammar = Grammar.compile(options, lm.tokenizer, lm.config.vocab_size, eos_token_ids)
    return Sampler(options, prompt, seed, tokenizer=lm.tokenizer, grammar=grammar)


def max_new_tokens_for(lm: LoadedModel, prompt: Sequence[int], kv: KVOptions) -> int:
    """How many tokens may follow the prompt: as many as the model's context has room for; ENDLESS where the cache
    rotates and positions with it.

    Raises GenerationError for a prompt of no tokens, of unknown ones, or of too many, and for a rotating cache that
    holds more than the context.
    """
    if not prompt:
        raise GenerationError("the prompt is empty", "some text to continue")
    size, limit = lm.config.vocab_size, lm.config.max_position_embeddings
    if not all(isinstance(token, int) and 0 <= token < size for token in prompt):
        raise GenerationError("the prompt has ids that this model doesn't have", f"ids from 0 to {size - 1}")
    if kv.size is not None and kv.size > limit:
        raise GenerationError(f"a cache of {kv.size} tokens is more than the model's context of {limit}", f"{limit}")
    if kv.size is not None and getattr(lm.config, "positions", None) != "learned":
        return UNLIMITED
    if len(prompt) >= limit:
        raise GenerationError(
            f"the prompt has {len(prompt)} tokens, and the model's context of {limit} has no room for more",
            f"a prompt of at most {limit - 1} tokens",
        )
    return limit - len(prompt)
