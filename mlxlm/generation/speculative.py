"""Speculative decoding: several drafted tokens are verified in one forward pass; the text stays the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.generation.certainty import margin_for
from mlxlm.generation.context import UNLIMITED, Context
from mlxlm.generation.decoding import OnPrefill, read_again_if_long
from mlxlm.generation.device_memory import async_eval, clear_memory_cache_at, wired_limit
from mlxlm.generation.draft_length import DraftLengthController
from mlxlm.generation.drafters import Drafter, DraftState, max_trimmable_tokens
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.result import SpeculationStats
from mlxlm.generation.sampling import Sampler
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

MAX_DRAFT_TOKENS = 32  # fewer than the positions by which a sliding window can be trimmed


class SpeculativeDecoder:
    """Drafts up to `num_draft_tokens` tokens, which the model verifies in one forward pass.

    A pass over k + 1 tokens costs little more than one over a single token, since the weights are read once either way.
    The model samples at every position with its own options and noise, and a drafted token is accepted if it equals the
    sampled one (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"). So
    every token, greedy or sampled, is the one of plain decoding, up to rounding. On a CPU, where rounding could change
    it, a plain step decides: see `sample_with_certainty` and `margin_for`.

    How many tokens are drafted, and whether any, depends on measured times: see `DraftLengthController`. A drafter
    without cost (prompt lookup) is also compared with plain steps, and drafts only if its last guess was right.

    One decoder serves the texts of one model, one after another or concurrently.

    Attributes:
        drafter: Where drafts come from.
        stats: The statistics of the text that began last.
    """

    def __init__(self, drafter: Drafter, num_draft_tokens: int = 8):
        """Decode with `drafter`. Raises GenerationError for an invalid `num_draft_tokens`."""
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise GenerationError(f"num_draft_tokens is {num_draft_tokens}", f"1 to {MAX_DRAFT_TOKENS}, such as 8")
        self.drafter = drafter
        self.stats = SpeculationStats()
        self._draft_length = DraftLengthController(num_draft_tokens)

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError if the drafter can't serve `lm`, such as for another tokenizer."""
        self.drafter.check(lm)

    def generate_tokens(
        self,
        context: Context,
        prompt: Sequence[int],
        sampler: Sampler,
        max_tokens: int,
        *,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        on_prefill: OnPrefill = None,
    ) -> Generator[int]:
        """As `decoding.generate_tokens`, with a Sampler."""
        self.stats = SpeculationStats()
        text = _Text(context, sampler, self._draft_length, self.stats)
        generate = partial(text.generate_tokens, self.drafter, prefill_step_size)
        return read_again_if_long(generate, context, prompt, max_tokens, on_prefill)


@dataclass
class _PlainStep:
    """A dispatched pass over one token.

    Attributes:
        result: The sampled token, `[1]`; logits `[1, V]` if the sampler needs the last token.
        ahead: Whether it was dispatched before the previous token was read.
    """

    result: mx.array
    ahead: bool


@dataclass
class _Round:
    """A dispatched pass over the last token and k drafted ones.

    Attributes:
        last_token: The last token.
        draft: `[k]`.
        logits: `[k + 1, V]`.
        sampled: The sampled tokens, and whether they are certain or None, `[k + 1]` each; None if the sampler needs the
            last token.
        timed: Whether its time counts: not if the drafter had a long text to read first.
    """

    last_token: int
    draft: mx.array
    logits: mx.array
    sampled: tuple[mx.array, mx.array | None] | None
    timed: bool


class _Text:
    """The decoding of one text.

    During a step the caches are ahead of `context.ids`, by the draft in flight and by accepted tokens not yet yielded.
    At a yield the context shows copies of the caches without them (they share arrays, nothing is computed), so that
    leaving there is exact.
    """

    def __init__(
        self, context: Context, sampler: Sampler, draft_length: DraftLengthController, stats: SpeculationStats
    ):
        self._context, self._sampler, self._draft_length, self._stats = context, sampler, draft_length, stats
        self._margin = margin_for(context.kv)
        self._cache_length = 0  # tokens that the caches have read
        self._max_length = _max_speculative_length(context.model)
        self._read_time: float | None = None

    def generate_tokens(
        self,
        drafter: Drafter,
        prefill_step_size: int,
        prompt: Sequence[int],
        max_tokens: int,
        on_prefill: OnPrefill,
    ) -> Generator[int]:
        context = self._context
        self._draft_state: DraftState = drafter.begin(context, prompt)
        try:
            with wired_limit():
                num_cached = context.trim_to_prefix(prompt)
                context.read(prompt[num_cached:-1], prefill_step_size, on_prefill)
                self._cache_length = len(prompt) - 1
                with context.transaction() as ids:
                    first_step = self._dispatch_step(mx.array(prompt[-1:], mx.int32), ahead=False)
                    ids.append(prompt[-1])
                yield from self._decode(first_step, max_tokens)
        finally:
            self._draft_state.close()

    def _decode(self, in_flight: _PlainStep | _Round | None, remaining: int) -> Generator[int]:
        """Yield `remaining` tokens, those of `in_flight` included."""
        context, step = self._context, 0
        decided: deque[int] = deque()
        caches, version = context.caches, context.version
        while remaining:
            context.check_unchanged(version)
            with context.transaction() as ids:
                context.caches = caches  # without the copies, so that buffers are written in place
                while not decided and in_flight is not None:
                    tokens, in_flight = self._collect(in_flight, remaining)
                    decided.extend(tokens)
                token, remaining, step = decided.popleft(), remaining - 1, step + 1
                self._sampler.accept(token)
                if remaining and not decided and in_flight is None:
                    in_flight = self._dispatch(token, remaining)
                if self._cache_length > len(ids):
                    ids.append(token)
                clear_memory_cache_at(step)
                if surplus := self._cache_length - len(ids):
                    context.caches = [_trimmed_copy(cache, surplus) for cache in caches]
            version = context.version
            yield token

    def _dispatch(self, token: int, remaining: int) -> _PlainStep | _Round:
        """Dispatch a pass over `token`, with a draft after it if that pays."""
        length = min(self._next_draft_length(), remaining - 1, self._max_length - self._cache_length - 1)
        length = min(length, max_trimmable_tokens(self._context, length + 1) - 1)
        draft, sampler = None, self._sampler
        if length > 0 and not sampler.ended:
            num_unread = self._draft_state.num_unread
            draft = self._draft_state.propose(length, sampler, self._vocab_size)
        if draft is None:
            return self._dispatch_step(mx.array([token], mx.int32), ahead=False)
        logits = self._forward(mx.concatenate([mx.array([token], mx.int32), draft]))
        sampled = None if sampler.needs_last_token else self._verify(logits, draft)
        async_eval(logits if sampled is None else sampled)
        self._stats.rounds += 1
        self._stats.proposed += draft.size
        return _Round(token, draft, logits, sampled, timed=num_unread <= 2)

    def _dispatch_step(self, token: mx.array, ahead: bool) -> _PlainStep:
        self._cache_length += 1
        logits = self._context.decode(token)
        self._vocab_size = logits.shape[-1]
        return _PlainStep(async_eval(logits if self._sampler.needs_last_token else self._sampler(logits)), ahead)

    def _forward(self, tokens: mx.array) -> mx.array:
        """Logits `[T, V]` after tokens `[T]`."""
        self._cache_length += tokens.size
        return self._context.model(tokens[None], cache=self._context.caches)[0]

    def _verify(self, logits: mx.array, draft: mx.array) -> tuple[mx.array, mx.array | None]:
        return self._sampler.verify_draft(logits, draft, self._margin)

    def _next_draft_length(self) -> int:
        """How many tokens the next draft may have."""
        length, reason = self._draft_length.next_draft_length(), self._draft_length.reason
        if self._cache_length + 2 > self._max_length:
            length, reason = 0, "the model's positions depend on how many tokens are read at once here"
        elif max_trimmable_tokens(self._context, 2) < 2:
            length, reason = 0, "the key-value cache can't be trimmed here"
        elif length and self._draft_state.last_draft_matched is False:
            length, reason = 0, "the drafter has no guess of what comes next"
        self._stats.reason = None if length else reason
        return length

    def _collect(self, in_flight: _PlainStep | _Round, remaining: int) -> tuple[list[int], _PlainStep | None]:
        """Read the result of a pass.

        Returns:
            The tokens that it decides, and the step that was dispatched ahead, if any.
        """
        if isinstance(in_flight, _PlainStep):
            tokens, following = self._collect_step(in_flight, remaining)
            timed, draft_length = in_flight.ahead, 0
        else:
            tokens, following = self._collect_round(in_flight)
            timed, draft_length = in_flight.timed, in_flight.draft.size
        now = time.perf_counter()
        if timed and self._read_time is not None:
            self._draft_length.record_time(draft_length, now - self._read_time)
        self._read_time = now
        return tokens, following

    def _collect_step(self, step: _PlainStep, remaining: int) -> tuple[list[int], _PlainStep | None]:
        token = async_eval(self._sampler(step.result)) if self._sampler.needs_last_token else step.result
        # If no draft comes next, the next step doesn't wait for the token to be read.
        plain = remaining > 1 and self._next_draft_length() == 0
        following = self._dispatch_step(token, ahead=True) if plain else None
        value = token.item()
        state = self._draft_state
        had_guess = state.last_draft_matched
        state.read([value])
        if had_guess and state.last_draft_matched is not None:
            self._draft_length.record_acceptance(int(state.last_draft_matched), int(not state.last_draft_matched))
        return [value], following

    def _collect_round(self, round: _Round) -> tuple[list[int], _PlainStep | None]:
        result = round.sampled or async_eval(self._verify(round.logits, round.draft))
        draft, sampled = round.draft.tolist(), result[0].tolist()
        certain = [True] * len(sampled) if result[1] is None else result[1].tolist()
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        num_certain = 0
        while num_certain <= num_accepted and certain[num_certain]:
            num_certain += 1
        if num_certain:
            self._sampler.accept_draft(round.logits, result[0][:num_certain])
        tokens, following = sampled[:num_certain], None
        if num_certain > num_accepted:
            self._trim(len(draft) - num_accepted)
        else:
            # The next token isn't certain: the token before it is read again, alone.
            num_accepted = num_certain
            self._trim(len(draft) + 1 - num_certain)
            last_token = tokens[-1] if tokens else round.last_token
            following = self._dispatch_step(mx.array([last_token], mx.int32), ahead=False)
            self._stats.num_redecoded += 1
        self._stats.accepted += num_accepted
        # A token that isn't certain costs as much as a rejected one: with typical sampling, no draft pays.
        self._draft_length.record_acceptance(num_accepted, int(num_accepted < len(draft)))
        self._draft_state.read(tokens)
        return tokens, following

    def _trim(self, n: int) -> None:
        self._cache_length -= n
        for cache in self._context.caches if n else ():
            cache.trim(n)


def _max_speculative_length(model: nn.Module) -> int:
    """The length up to which reading several tokens at once equals reading them one by one.

    With "dynamic" RoPE scaling, the positions of tokens beyond the original context depend on the last token that is
    read with them.
    """
    if isinstance(model, Decoder) and (model.config.rope_scaling or {}).get("rope_type") == "dynamic":
        return model.config.max_position_embeddings
    return UNLIMITED


def _trimmed_copy(cache: Any, n: int) -> Any:
    """A copy of a cache without its last n tokens, which shares its arrays."""
    trimmed = cache.copy() if hasattr(cache, "copy") else copy(cache)
    trimmed.trim(n)
    return trimmed
