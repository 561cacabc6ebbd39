"""How many tokens to draft per round of speculative decoding, from measured times and acceptance."""

from __future__ import annotations

from collections import deque
from statistics import median

PLAIN_STEPS = 4  # measured as one time: single plain steps overlap, so that their times say little
INITIAL_LENGTH = 4  # maximum draft length at first; later, twice the longest measured one
MIN_SAMPLES = 2  # times of a draft length before it counts as known: the first may include a compilation
RECENT_SAMPLES = 8  # times of a draft length that count, by their median
MAX_AGE = 256  # passes after which a time no longer counts: a longer context costs more
DECAY = 0.97  # weight of an outcome after each later one: about the last 33 count
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 4.0  # the acceptance rate assumed at first, and how many outcomes it counts for
INITIAL_ACCEPTANCE = PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT, 0  # accepted, weight, and number of outcomes
PROVEN = 16  # outcomes after which rounds that pay reset the next pause to the shortest
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps before another try; doubled after each that didn't pay

MEASURING = "plain steps are measured first"


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
        speedups = [self._expected_tokens(k) * times[0] / _interpolate(times, k) for k in range(longest + 1)]
        best = max(range(longest + 1), key=speedups.__getitem__)
        if best and self._pause:
            self._end_pause()
        elif best == 0 and not self._pause:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self.reason = (
                f"drafts don't pay: with {self.acceptance_rate:.0%} of them accepted, rounds give "
                f"{max(speedups[1:]):.2g} x the tokens/s of plain steps; next try after {self._pause} tokens"
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
