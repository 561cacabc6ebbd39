"""The state of one text while it is generated: its tokens, its end, its timings."""

from __future__ import annotations

import time
from array import array
from io import StringIO

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation.constraint import Grammar
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.generation.request import Request
from mlxlm.generation.result import FinishReason, GenerationChunk, GenerationResult, SpeculationStats, Timings
from mlxlm.generation.sampling import Sampler
from mlxlm.generation.stop_strings import StopStrings


class TokenSequence:
    """One text, streamed alone or as a row of a batch. Computes nothing on the device.

    Attributes:
        prompt: The ids of the prompt.
        snapshot_at: As in `Request`.
        sampler: Draws the tokens.
        seed: The seed of the sampler.
        deterministic: Whether the text depends on nothing but its request.
        limit: The maximum number of tokens.
        num_cached: How many tokens of the prompt didn't have to be read.
        speculation: The statistics of speculative decoding, if it is used.
    """

    def __init__(self, lm: LoadedModel, request: Request, kv: KVOptions, grammar: Grammar | None = None):
        """Prepare a text, with a cache of the options `kv` and the compiled constraint of the request.

        Raises:
            GenerationError: For an empty prompt, one that leaves no room in the model's context, and options that
                this model or its tokenizer can't serve.
        """
        self.prompt, options, self.snapshot_at = list(request.prompt), request.options, request.snapshot_at
        room = request.check(lm, kv)
        self.seed = random_seed() if options.seed is None else options.seed
        self.deterministic = options.is_deterministic
        self.limit = room if options.max_tokens is None else min(room, options.max_tokens)
        self.num_cached = 0
        self.speculation: SpeculationStats | None = None
        self._limit_reason: FinishReason = "length" if self.limit == options.max_tokens else "context"
        self._eos_token_ids = lm.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids
        self.sampler = Sampler(options, self.prompt, self.seed, tokenizer=lm.tokenizer, grammar=grammar)
        # Special tokens that a grammar asks for, such as the markup of tool calls, are part of the text.
        self._tokenizer, self._skip_special_tokens = lm.tokenizer, options.grammar is None
        self._detokenizer = lm.tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens)
        self._empty = True  # no token has added a byte yet
        self._stop_strings = StopStrings(options.stop)
        self._text = StringIO()
        self._tokens = array("i")
        self._logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._start_time = self._last_token_time = time.perf_counter()
        self._first_token_time: float | None = None

    def __len__(self) -> int:
        """The number of tokens of prompt and text."""
        return len(self.prompt) + len(self._tokens)

    @property
    def remaining(self) -> int:
        """How many more tokens the text may have."""
        return self.limit - len(self._tokens)

    @property
    def last_token(self) -> int:
        """The last token of prompt and text."""
        return self._tokens[-1] if self._tokens else self.prompt[-1]

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and text."""
        return self.prompt + self._tokens.tolist()

    def start(self) -> None:
        """Restart the clock of the timings, unless the text has begun."""
        if not self._tokens:
            self._start_time = time.perf_counter()

    def push(self, token: int) -> GenerationChunk:
        """Append a token that `sampler` drew and accepted. A chunk with a `finish_reason` is the last one."""
        self._last_token_time = time.perf_counter()
        self._first_token_time = self._first_token_time or self._last_token_time
        self._tokens.append(token)
        logprob = self.sampler.pop_logprobs(self._added_bytes)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        is_eos = token in self._eos_token_ids
        self._empty = self._empty and (is_eos or not self._token_bytes(token))
        text = "" if is_eos else self._stop_strings.push(self._detokenizer.add_token(token))
        reason = self._reason_after(is_eos)
        if reason:
            text += self._stop_strings.push(self._detokenizer.finalize())
            text += self._stop_strings.flush()
        self._finish_reason = "stop" if self._stop_strings.matched else reason
        self._text.write(text)
        return GenerationChunk(text, token, self._finish_reason, logprob)

    def result(self) -> GenerationResult:
        """The text so far, with its statistics."""
        return GenerationResult(
            text=self._text.getvalue(),
            tokens=self._tokens.tolist(),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.num_cached,
            finish_reason=self._finish_reason,
            seed=self.seed,
            timings=self._timings(),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            constraint_error=self._constraint_error(),
            speculation=self.speculation,
        )

    def _reason_after(self, is_eos: bool) -> FinishReason | None:
        """Why the text ends with its last token, if it does and not by a stop string."""
        matcher = self.sampler.matcher
        if is_eos or matcher is not None and matcher.finished:
            return "eos"
        if matcher is not None and matcher.error:
            return "constraint"
        return self._limit_reason if self.remaining <= 0 else None

    def _added_bytes(self, token: int) -> bytes | None:
        """The bytes that a token adds to the text here; None if the tokenizer's tokens aren't bytes."""
        if not self._tokenizer.has_byte_tokens:
            return None
        added = b"" if token in self._eos_token_ids else self._token_bytes(token)
        return added.removeprefix(b" ") if self._empty and self._tokenizer.strips_dummy_prefix else added

    def _token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, skip_special_tokens=self._skip_special_tokens)

    def _constraint_error(self) -> str | None:
        matcher = self.sampler.matcher
        if matcher is None or self._finish_reason is None:
            return None
        if self._finish_reason == "stop":
            return matcher.constraint_error_of(self._text.getvalue())
        return matcher.constraint_error

    def _timings(self) -> Timings:
        peak = mx.get_peak_memory()
        if self._first_token_time is None:
            return Timings(None, None, None, peak)
        to_first = self._first_token_time - self._start_time
        decoding = self._last_token_time - self._first_token_time
        return Timings(
            time_to_first_token=to_first,
            prompt_tokens_per_second=(len(self.prompt) - self.num_cached) / to_first,
            tokens_per_second=(len(self._tokens) - 1) / decoding if decoding else None,
            peak_memory_bytes=peak,
        )
