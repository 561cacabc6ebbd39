"""Speculative decoding: guessed tokens are checked several at a time, and the text stays what it would have been."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation.context import PREFILL_STEP_SIZE, UNLIMITED, Context, async_eval, clear_memory_cache
from mlxlm.generation.decoding import CLEAR_CACHE_INTERVAL, wired_limit
from mlxlm.generation.draft_length import MEASURING, DraftLengthController
from mlxlm.generation.drafters import Drafter, DraftState, max_trimmable_tokens
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

# Logits by which the drawn token must lead the next best one: many times the difference that computing several rows at
# once makes, through rounding there and in the keys and values left behind. Measured on a CPU with models of 14M to 82M
# parameters and up to 33 rows: 1e-5 in float32, and nothing in float16 and bfloat16. GPUs, not measured, multiply
# float32 with 10 bits where there are several rows.
_HALF = {mx.float16: 0.1, mx.bfloat16: 0.5}
MARGINS = dict.fromkeys((mx.float32, mx.float16, mx.bfloat16), 0.002) if ON_CPU else {mx.float32: 0.1, **_HALF}
# A quantized cache rounds a difference to another step: measured 0.002 in float32, 0.01 in float16, 0.04 in bfloat16.
QUANTIZED_MARGINS = {mx.float32: 0.03 if ON_CPU else 0.1, **_HALF}
MAX_DRAFT_TOKENS = 32  # proposals at a time; below the positions that a sliding window can give back


@dataclass
class SpeculationStats:
    """What came of a text's proposals so far.

    proposed, accepted: tokens. rounds: forward passes over proposals. decided_again: draws that were too close, and
    were taken from a plain step instead. reason: why no proposals are being made, None where some are.
    """

    proposed: int = 0
    accepted: int = 0
    rounds: int = 0
    num_redecoded: int = 0
    reason: str | None = MEASURING

    @property
    def active(self) -> bool:
        """Whether proposals are being made."""
        return self.reason is None

    @property
    def acceptance_rate(self) -> float | None:
        """The share of proposals accepted; None before there were any."""
        return self.accepted / self.proposed if self.proposed else None


class SpeculativeDecoder:
    """Lets a drafter guess up to `num_draft_tokens` tokens ahead, and the model check them in one forward pass.

    A pass over k + 1 tokens costs little more than one over a single token, since the weights are read once either way.
    The model draws at every position with its own settings and its own noise, and a guess is accepted if it is what
    was drawn (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"). So
    every token is the one that plain decoding draws, greedy or sampled, whatever was guessed; with an exact account of
    rounding: where the drawn token leads the next best one by less than a margin (`MARGINS`, `QUANTIZED_MARGINS`), a
    plain step decides.

    How many are guessed, and whether at all, follows from what was measured: see `DraftLengthController`. A drafter that costs nothing
    (n-gram lookup) is also checked against plain steps, and only proposes where its last guess was right.

    One Speculation is for the texts of one model, one after another or at once; `stats` is of the one begun last.
    """

    def __init__(self, drafter: Drafter, num_draft_tokens: int = 8):
        """Raises GenerationError for a number of guesses that can't work."""
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise GenerationError(
                f"{num_draft_tokens} proposals at a time can't work", f"1 to {MAX_DRAFT_TOKENS}, such as 8"
            )
        self.drafter = drafter
        self.stats = SpeculationStats()
        self._draft_length = DraftLengthController(num_draft_tokens)

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError where this drafter can't serve the texts of `lm` (another tokenizer)."""
        self.drafter.check(lm)

    def tokens(
        self,
        context: Context,
        prompt: Sequence[int],
        sampler,
        max_tokens: int,
        *,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        on_prefill: Callable[[int], None] | None = None,
    ) -> Iterator[int]:
        """The ids of `generate_tokens`, with its arguments and its promises; `sampler` is a Sampler."""
        self.stats = SpeculationStats()
        text = _Text(context, sampler, self._draft_length, self.stats)
        return text.tokens(self.drafter, prompt, max_tokens, prefill_step_size, on_prefill)


@dataclass
class _Step:
    """A pass over one token. `result`: the token drawn, `[1]`; where draws wait, the logits `[1, V]`."""

    result: mx.array
    in_line: bool  # dispatched before the token before was read


@dataclass
class _Round:
    """A pass over the last token and k guesses. `result`: the tokens drawn and their gaps, `[k + 1]` each; where draws
    wait, the logits `[k + 1, V]`."""

    last: int
    draft: mx.array
    result: tuple[mx.array, mx.array] | mx.array
    counts: bool  # in the measured times: the drafter had no long text to read first


class _Text:
    """The decoding of one text. While it computes, the caches are ahead of `context.ids`: by proposals in flight, by
    accepted tokens not yet yielded. At a yield the context shows copies without them (arrays are shared, nothing is
    computed), so that leaving there, or never coming back, is exact."""

    def __init__(self, context: Context, sampler, pace: DraftLengthController, stats: SpeculationStats):
        self._context, self._sampler, self._draft_length, self._stats = context, sampler, pace, stats
        kv = context.kv
        self._margins = QUANTIZED_MARGINS if kv.key_bits or kv.value_bits else MARGINS
        self._held = 0  # tokens that the caches have read
        self._alike = _alike_up_to(context.model)
        self._read_at: float | None = None

    def tokens(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        max_tokens: int,
        prefill_step_size: int,
        on_prefill: Callable[[int], None] | None,
    ) -> Iterator[int]:
        context = self._context
        self._draft_state: DraftState = drafter.begin(context, prompt, max_tokens)
        try:
            with wired_limit():
                held = context.trim_to_prefix(prompt, max_tokens)
                context.read(prompt[held:-1], prefill_step_size, on_prefill)
                self._held = len(prompt) - 1
                with context.transaction() as ids:
                    flight = self._step(mx.array(prompt[-1:]), in_line=False)
                    ids.append(prompt[-1])
                yield from self._decode(flight, max_tokens)
        finally:
            self._draft_state.close()

    def _decode(self, flight: _Step | _Round | None, left: int) -> Iterator[int]:
        """`left`: how many tokens are still to come, those of `flight` included."""
        context, done = self._context, 0
        known: deque[int] = deque()
        caches, seen = context.caches, context.version
        while left:
            context.check_unchanged(seen)
            with context.transaction() as ids:
                context.caches = caches  # no copy is left, so that buffers are written in place
                while not known:
                    decided, flight = self._collect(flight, left)
                    known.extend(decided)
                token, left, done = known.popleft(), left - 1, done + 1
                self._sampler.accept(token)
                if left and not known and flight is None:
                    flight = self._next(token, left)
                if self._held > len(ids):
                    ids.append(token)
                if done % CLEAR_CACHE_INTERVAL == 0:
                    clear_memory_cache()
                if surplus := self._held - len(ids):
                    context.caches = [_without(cache, surplus) for cache in caches]
            seen = context.version
            yield token

    # Passes

    def _step(self, token: mx.array, in_line: bool) -> _Step:
        logits = self._forward(token)[-1:]
        self._vocab_size, self._margin = logits.shape[-1], self._margins[logits.dtype]
        return _Step(async_eval(logits if self._sampler.needs_last_token else self._sampler(logits)), in_line)

    def _forward(self, tokens: mx.array) -> mx.array:
        """tokens `[T]` -> logits `[T, V]`."""
        self._held += tokens.size
        return self._context.model(tokens[None], cache=self._context.caches)[0]

    def _next(self, token: int, left: int) -> _Step | _Round:
        """Read `token`, of which the value is known, with guesses behind it where that pays."""
        proposals = min(self._proposals(), left - 1, self._alike - self._held - 1)
        proposals = min(proposals, max_trimmable_tokens(self._context, proposals + 1) - 1)
        draft, sampler = None, self._sampler
        over = sampler.needs_last_token and (sampler.finished or sampler.error)  # nothing can be drawn
        if proposals > 0 and not over:
            num_unread = self._draft_state.num_unread
            draft = self._draft_state.propose(proposals, sampler, self._vocab_size)
        if draft is None:
            return self._step(mx.array([token]), in_line=False)
        logits = self._forward(mx.concatenate([mx.array([token], mx.int32), draft]))
        result = logits if sampler.needs_last_token else sampler.verify_draft(logits, draft)
        self._stats.rounds += 1
        self._stats.proposed += draft.size
        return _Round(token, draft, async_eval(result), counts=num_unread <= 2)

    def _proposals(self) -> int:
        """How many guesses the next round may have."""
        proposals, reason = self._draft_length.next_draft_length(), self._draft_length.reason
        if self._held + 2 > self._alike:
            proposals, reason = 0, "the model's positions depend on how many tokens are read at once here"
        elif max_trimmable_tokens(self._context, 2) < 2:
            proposals, reason = 0, "the key-value cache can't take tokens back here"
        elif proposals and self._draft_state.last_draft_matched is False:
            proposals, reason = 0, "there is no guess of what comes next"
        self._stats.reason = None if proposals else reason
        return proposals

    # What came of them

    def _collect(self, flight: _Step | _Round, left: int) -> tuple[list[int], _Step | None]:
        """The tokens that are decided by a pass, and the step that is on its way already, if any."""
        if isinstance(flight, _Step):
            known, following = self._collect_step(flight, left)
            counts, kind = flight.in_line, 0
        else:
            known, following = self._collect_round(flight)
            counts, kind = flight.counts, flight.draft.size
        now = time.perf_counter()
        if counts and self._read_at is not None:
            self._draft_length.record_time(kind, now - self._read_at)
        self._read_at = now
        return known, following

    def _collect_step(self, flight: _Step, left: int) -> tuple[list[int], _Step | None]:
        token = async_eval(self._sampler(flight.result)) if self._sampler.needs_last_token else flight.result
        # Where no guess is to come, the next step doesn't wait for the token to be read.
        following = self._step(token, in_line=True) if left > 1 and self._proposals() == 0 else None
        value = token.item()
        expected = self._draft_state.last_draft_matched
        self._draft_state.read([value])
        if expected and self._draft_state.last_draft_matched is not None:
            self._draft_length.record_acceptance(
                int(self._draft_state.last_draft_matched), int(not self._draft_state.last_draft_matched)
            )
        return [value], following

    def _collect_round(self, flight: _Round) -> tuple[list[int], _Step | None]:
        needs_last_token = self._sampler.needs_last_token
        tokens, gaps = (
            async_eval(self._sampler.verify_draft(flight.result, flight.draft)) if needs_last_token else flight.result
        )
        draft, drawn, leads = flight.draft.tolist(), tokens.tolist(), gaps.tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == drawn[accepted]:
            accepted += 1
        sure = 0
        while sure <= accepted and leads[sure] >= self._margin:
            sure += 1
        if sure:
            self._sampler.accept_draft(tokens[:sure])
        if sure > accepted:
            self._forget(len(draft) - accepted)
            known, following = drawn[:sure], None
        else:
            # Row `sure` is too close: the token that it has read is read again, alone.
            accepted = sure
            self._forget(len(draft) + 1 - sure)
            known, last = drawn[:sure], drawn[sure - 1] if sure else flight.last
            following = self._step(mx.array([last]), in_line=False)
            self._stats.num_redecoded += 1
        self._stats.accepted += accepted
        self._draft_length.record_acceptance(accepted, int(following is None and accepted < len(draft)))
        self._draft_state.read(known)
        return known, following

    def _forget(self, n: int) -> None:
        self._held -= n
        for cache in self._context.caches if n else ():
            cache.trim(n)


def _alike_up_to(model) -> int:
    """The length up to which reading tokens together is reading them one by one: with "dynamic" positions, those of
    tokens beyond the model's own context depend on the last one that is read with them."""
    if isinstance(model, Decoder) and (model.config.rope_scaling or {}).get("rope_type") == "dynamic":
        return model.config.max_position_embeddings
    return UNLIMITED


def _without(cache, n: int):
    """A copy of a cache that doesn't hold the last n tokens. Arrays are shared."""
    shorter = cache.copy() if hasattr(cache, "copy") else copy(cache)
    shorter.trim(n)
    return shorter
