"""Speculative decoding: several drafted tokens are verified in one forward pass; the text stays the same.

How many tokens are drafted per round follows from measured times and acceptance.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import KVOptions
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.drafters import Drafter, DraftState, max_trimmable_tokens
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.result import MEASURING, SpeculationStats
from mlxlm.generation.sampling import Sampler
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

PLAIN_STEPS = 4  # measured as one time: single plain steps overlap, so that their times say little
INITIAL_LENGTH = 1  # maximum draft length at first, when a wrong guess costs least; then twice the longest measured one
MIN_SAMPLES = 2  # times of a draft length before it counts as known: the first may include a compilation
RECENT_SAMPLES = 8  # times of a draft length that count, by their median
MAX_AGE = 256  # passes after which a time no longer counts: a longer context costs more
DECAY = 0.97  # weight of an outcome after each later one: about the last 33 count
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # the acceptance rate assumed at first, and how many outcomes it counts for
INITIAL_ACCEPTANCE = PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT, 0  # accepted, weight, and number of outcomes
PROVEN = 16  # outcomes after which rounds that pay reset the next pause to the shortest
MAX_DRAFT_TOKENS = 32  # fewer than the positions by which a sliding window can be trimmed
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps before another try; doubled after each that didn't pay


class DraftLengthController:
    """Chooses the draft length k with the highest expected tokens per second.

    If each draft token is accepted with probability a, given that those before it were, a round of k gives
    (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1). The times of rounds and of plain steps are
    measured from token to token, with everything in between. If no k beats plain steps, nothing is drafted during a
    pause. Then the acceptance rate starts from its prior again, or earlier if outcomes that cost nothing say that
    drafting would pay. The choice never changes a text.

    Attributes:
        reason: Why nothing is drafted, if `next_draft_length` returns 0.
    """

    def __init__(self, num_draft_tokens: int):
        """`num_draft_tokens`: the maximum draft length."""
        self._max_length = num_draft_tokens
        self._times: dict[int, deque[tuple[int, float]]] = {}  # per draft length: number of the pass, seconds
        self._num_passes = 0
        self._plain_times: list[float] = []  # of the plain steps since the last measurement
        self._pause = self._paused_steps = 0  # length of the current pause, 0 for none; steps of it so far
        self._next_pause = SHORTEST_PAUSE
        self._has_new_outcome = False
        self.reason = MEASURING
        self._accepted, self._weight, self._num_outcomes = INITIAL_ACCEPTANCE

    @property
    def acceptance_rate(self) -> float:
        """The estimated probability that a draft token is accepted if those before it were."""
        return self._accepted / self._weight

    def record_acceptance(self, accepted: int, rejected: int) -> None:
        """Record the outcome of a round: tokens accepted, and 0 or 1 rejected after them."""
        for outcome in [1] * accepted + [0] * rejected:
            self._accepted = DECAY * self._accepted + outcome
            self._weight = DECAY * self._weight + 1
            self._num_outcomes += 1
            self._has_new_outcome = True

    def record_time(self, draft_length: int, seconds: float) -> None:
        """Record the time of a pass with `draft_length` draft tokens; 0 is a plain step."""
        self._num_passes += 1
        if draft_length == 0:
            self._plain_times.append(seconds)
            if self._pause:
                self._count_paused_step()
            if len(self._plain_times) < PLAIN_STEPS:
                return
            seconds = sum(self._plain_times) / PLAIN_STEPS
        self._plain_times.clear()
        self._times.setdefault(draft_length, deque(maxlen=RECENT_SAMPLES)).append((self._num_passes, seconds))

    def next_draft_length(self) -> int:
        """The draft length of the next round; 0 for a plain step."""
        times = self._known_times()
        if 0 not in times or self._pause and not self._has_new_outcome:
            return 0
        self._has_new_outcome = False
        longest = min(self._max_length, max(INITIAL_LENGTH, 2 * max(times)))
        # Powers of two: each length has compiled passes of its own, and needs measurements.
        lengths = [k for k in range(longest + 1) if k & (k - 1) == 0]
        speedups = {k: self._expected_tokens(k) * times[0] / _interpolate(times, k) for k in lengths}
        best = max(lengths, key=speedups.__getitem__)
        if best and self._pause:
            self._end_pause()
        elif best == 0 and not self._pause:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            speedup = max(speedups[k] for k in lengths if k)
            self.reason = (
                f"drafts don't pay: with {self.acceptance_rate:.0%} of them accepted, rounds give "
                f"{speedup:.2g} x the tokens/s of plain steps; next try after {self._pause} tokens"
            )
        elif best and self._num_outcomes >= PROVEN:
            self._next_pause = SHORTEST_PAUSE
        return best

    def _count_paused_step(self) -> None:
        self._paused_steps += 1
        if self._paused_steps == self._pause:
            self._end_pause()
            self._times = {0: self._times[0]}
            self._accepted, self._weight, self._num_outcomes = INITIAL_ACCEPTANCE

    def _end_pause(self) -> None:
        self._pause = self._paused_steps = 0
        self.reason = MEASURING

    def _expected_tokens(self, draft_length: int) -> float:
        return sum(self.acceptance_rate**i for i in range(draft_length + 1))

    def _known_times(self) -> dict[int, float]:
        """Seconds per draft length, for those measured often and recently enough."""
        oldest = self._num_passes - MAX_AGE
        recent = {k: [s for number, s in times if number > oldest] for k, times in self._times.items()}
        return {k: median(seconds) for k, seconds in recent.items() if len(seconds) >= MIN_SAMPLES}


def _interpolate(times: dict[int, float], k: int) -> float:
    """The seconds of draft length k, interpolated linearly between the nearest measured ones.

    Beyond the longest measured one, its own time is returned: that longer drafts look cheap is why they are tried.
    """
    below = max(known for known in times if known <= k)
    above = min((known for known in times if known > k), default=None)
    if above is None or below == k:
        return times[below]
    fraction = (k - below) / (above - below)
    return times[below] * (1 - fraction) + times[above] * fraction


class SpeculativeDecoder:
    """Drafts up to `num_draft_tokens` tokens, which the model verifies in one forward pass.

    A pass over k + 1 tokens costs little more than one over a single token, since the weights are read once either way.
    The model samples at every position with its own options and noise, and a drafted token is accepted if it equals the
    sampled one (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"). So
    every token, greedy or sampled, is the one of plain decoding, up to rounding. On a CPU, where rounding could change
    it, a plain step decides: see `sample_with_certainty` and `margin_for`.

    How many tokens are drafted, and whether any, depends on measured times: see `DraftLengthController`. A drafter
    without cost (prompt lookup) is also compared with plain steps, and drafts only if its last guess was right. Of
    several drafters, the first that has a guess and pays drafts.

    One decoder serves the texts of one model, one after another or concurrently.

    Attributes:
        drafters: Where drafts come from.
        stats: The statistics of the text that began last.
    """

    def __init__(self, drafter: Drafter, *others: Drafter, num_draft_tokens: int = 8):
        """Decode with these drafters. Raises GenerationError for an invalid `num_draft_tokens`."""
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise GenerationError(f"num_draft_tokens is {num_draft_tokens}", f"1 to {MAX_DRAFT_TOKENS}, such as 8")
        self.drafters = [drafter, *others]
        self.stats = SpeculationStats()
        self._draft_lengths = [DraftLengthController(num_draft_tokens) for _ in self.drafters]

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError if the drafts can't be used for `lm`."""
        for drafter in self.drafters:
            drafter.check(lm)

    def begin(self, model: nn.Module, kv: KVOptions, ids: Sequence[int]) -> Drafting:
        """Start to draft the text after `ids`. Raises GenerationError if that is impossible."""
        self.stats = SpeculationStats()
        states = [drafter.begin(model, kv, ids) for drafter in self.drafters]
        return Drafting(model, list(zip(states, self._draft_lengths, strict=True)), self.stats)


@dataclass
class Draft:
    """A draft that a pass has read.

    Attributes:
        tokens: int32 `[k]`.
        logits: Those after the last token and each of these, `[k + 1, V]`.
    """

    tokens: mx.array
    logits: mx.array


class Drafting:
    """The drafts of one text: proposed, compared with what the model samples, and their costs recorded.

    Attributes:
        stats: The statistics of the text.
        is_timed: Whether the time of the last draft counts: not if the drafter had a long text to read first.
    """

    def __init__(
        self, model: nn.Module, sources: list[tuple[DraftState, DraftLengthController]], stats: SpeculationStats
    ):
        """`sources`: in order of preference."""
        self._sources, self.stats = sources, stats
        self._state, self._draft_length = sources[0]  # the source of the last or next draft
        self._max_length = _max_speculative_length(model)
        self._must_step = False  # the next token is decided by a pass over the last token alone
        self._read_time: float | None = None
        self.is_timed = False

    def next_length(self, caches: Sequence[Any], num_held: int) -> int:
        """How many tokens the next draft may have, after `num_held` tokens in the caches."""
        length, reason = 0, "the drafter has no guess of what comes next"
        for source in self._sources:
            self._state, self._draft_length = source
            if self._state.last_draft_matched is not False:
                length, reason = self._draft_length.next_draft_length(), self._draft_length.reason
            if length:
                break
        if num_held + 2 > self._max_length:
            length, reason = 0, "the model's positions depend on how many tokens are read at once here"
        elif max_trimmable_tokens(caches, 2) < 2:
            length, reason = 0, "the key-value cache can't be trimmed here"
        self.stats.reason = None if length else reason
        return length

    def propose(
        self, caches: Sequence[Any], num_held: int, room: int, sampler: Sampler, vocab_size: int
    ) -> mx.array | None:
        """Draft the next tokens, int32 `[k]`; None for a plain step.

        Args:
            caches: Those of the text.
            num_held: How many tokens they hold.
            room: How many tokens may follow.
            sampler: That of the text; not advanced.
            vocab_size: The width of its logits.
        """
        self.is_timed = False
        if self._must_step:
            self._must_step = False
            return None
        length = min(self.next_length(caches, num_held), room - 1, self._max_length - num_held - 1)
        length = min(length, max_trimmable_tokens(caches, length + 1) - 1)
        if length < 1:
            return None
        is_timed = not self._state.is_behind
        draft = self._state.propose(length, sampler, vocab_size)
        if draft is not None:
            self.is_timed = is_timed
            self.stats.rounds += 1
            self.stats.proposed += draft.size
        return draft

    def read_token(self, token: int, hidden_states: mx.array | None) -> None:
        """Note the token of a plain step, and the hidden states `[1, hidden]` from which it was drawn."""
        for state, draft_length in self._sources:
            had_guess = state.last_draft_matched
            state.read([token], hidden_states)
            if had_guess and (matched := state.last_draft_matched) is not None:
                draft_length.record_acceptance(int(matched), int(not matched))

    def read_draft(
        self,
        draft: Draft,
        sampled: mx.array,
        certain: mx.array | None,
        sampler: Sampler,
        hidden_states: mx.array | None = None,
    ) -> tuple[list[int], int]:
        """Accept the drafted tokens that equal the sampled ones, up to one that isn't certain.

        Args:
            draft: The draft.
            sampled: What the model samples after the last token and each of the draft's, int32 `[k + 1]`.
            certain: Whether rounding can't change these, bool `[k + 1]`; None if all are certain.
            sampler: That of the text, which advances by the tokens that are accepted.
            hidden_states: Those from which the tokens are sampled, `[k + 1, hidden]`.

        Returns:
            The tokens, of which the last is not a drafted one if all are certain; and how many of the last tokens in
            the caches have to be trimmed, so that they hold all tokens but the last.
        """
        drafted, tokens = draft.tokens.tolist(), sampled.tolist()
        is_certain = [True] * len(tokens) if certain is None else certain.tolist()
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        num_certain = 0
        while num_certain <= num_accepted and is_certain[num_certain]:
            num_certain += 1
        if num_certain:
            sampler.accept_draft(draft.logits, sampled[:num_certain])
        if num_certain <= num_accepted:  # the next token isn't certain: the one before it is read again, alone
            num_accepted, self._must_step = num_certain, True
            self.stats.num_redecoded += 1
        self.stats.accepted += num_accepted
        # A token that isn't certain costs as much as a rejected one: with typical sampling, no draft pays.
        self._draft_length.record_acceptance(num_accepted, int(num_accepted < len(drafted)))
        tokens = tokens[:num_certain]
        for state, _ in self._sources:
            state.read(tokens, None if hidden_states is None else hidden_states[: len(tokens)])
        return tokens, len(drafted) + 1 - len(tokens)

    def record_time(self, draft_length: int, timed: bool) -> None:
        """Note that a pass was read now; `timed` if the time since the last one is what such a pass costs."""
        now = time.perf_counter()
        if timed and self._read_time is not None:
            sources = [self._draft_length] if draft_length else [each for _, each in self._sources]
            for source in sources:
                source.record_time(draft_length, now - self._read_time)
        self._read_time = now

    def close(self) -> None:
        """End the text."""
        for state, _ in self._sources:
            state.close()


def _max_speculative_length(model: nn.Module) -> int:
    """The length up to which reading several tokens at once equals reading them one by one.

    With "dynamic" RoPE scaling, the positions of tokens beyond the original context depend on the last token that is
    read with them.
    """
    if isinstance(model, Decoder) and (model.config.rope_scaling or {}).get("rope_type") == "dynamic":
        return model.config.max_position_embeddings
    return UNLIMITED
