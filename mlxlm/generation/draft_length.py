"""How many tokens to propose at a time, and whether at all: decided by what was measured."""

from __future__ import annotations

from collections import deque
from statistics import median

PLAIN = 4  # plain steps that are measured as one: while they overlap, single ones tell little
START = 4  # proposals that a round may have at first; later, twice as many as the largest that was measured
SAMPLES = 2  # measurements of a kind before it is known: the first may compile something
RECENT = 8  # measurements of a kind that count, by their median
STALE = 256  # passes after which a measurement counts no more: a longer context costs more
MEMORY = 0.97  # weight that an outcome keeps with each later one: about the last 33 count
HOPE, HOPE_WEIGHT = 0.7, 4.0  # the acceptance that is assumed before anything was seen, and for how many outcomes
PROVEN = 16  # outcomes in which rounds must have paid for a pause to begin at the shortest again
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps before another try, doubled after each that didn't pay

MEASURING = "plain steps are measured first"


class DraftLengthController:
    """Chooses the number of proposals k that gives the most tokens a second.

    If each proposal is accepted with probability a, given that those before it were, a round of k gives
    (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1). Its seconds, and those of a plain step, are
    measured from token to token, with everything in between. Where no k beats plain steps, none is proposed for a
    pause; then a new try begins as hopefully as the first, or earlier where outcomes that cost nothing say that it
    would pay. No choice changes a text.
    """

    def __init__(self, num_draft_tokens: int):
        self._most = num_draft_tokens
        self._seconds: dict[int, deque[tuple[int, float]]] = {}  # by k: when, and how many
        self._passes = 0
        self._plain: list[float] = []  # plain steps on the way to a measurement
        self._pause = self._waited = 0  # plain steps of the pause that is on, 0 for none; and those done
        self._next_pause = SHORTEST_PAUSE
        self._learnt = False  # an outcome during the pause
        self.reason = MEASURING  # why there are no proposals, where `next_draft_length` gives 0
        self._hope()

    def _hope(self) -> None:
        self._accepted, self._seen, self._outcomes = HOPE * HOPE_WEIGHT, HOPE_WEIGHT, 0

    @property
    def acceptance_rate(self) -> float:
        """How probable it is that a proposal is accepted, where those before it were."""
        return self._accepted / self._seen

    def record_acceptance(self, accepted: int, refused: int) -> None:
        """So many proposals were accepted, and one or none refused after them."""
        for hit in [1] * accepted + [0] * refused:
            self._accepted = MEMORY * self._accepted + hit
            self._seen = MEMORY * self._seen + 1
            self._outcomes += 1
            self._learnt = True

    def record_time(self, proposals: int, seconds: float) -> None:
        """A pass with `proposals` took so long; one with 0 is a plain step."""
        self._passes += 1
        if proposals == 0:
            self._plain.append(seconds)
            if self._pause:
                self._wait()
            if len(self._plain) < PLAIN:
                return
            seconds = sum(self._plain) / PLAIN
        self._plain.clear()
        self._seconds.setdefault(proposals, deque(maxlen=RECENT)).append((self._passes, seconds))

    def _wait(self) -> None:
        self._waited += 1
        if self._waited == self._pause:
            self._resume()
            self._seconds = {0: self._seconds[0]}
            self._hope()

    def _resume(self) -> None:
        self._pause = self._waited = 0
        self.reason = MEASURING

    def next_draft_length(self) -> int:
        """The number of proposals of the next round; 0 for a plain step."""
        costs = self._costs()
        if 0 not in costs or self._pause and not self._learnt:
            return 0
        self._learnt = False
        num_draft_tokens = min(self._most, max(START, 2 * max(costs)))
        gains = [self._tokens(k) * costs[0] / _between(costs, k) for k in range(num_draft_tokens + 1)]
        best = max(range(num_draft_tokens + 1), key=gains.__getitem__)
        if best and self._pause:
            self._resume()
        elif best == 0 and not self._pause:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self.reason = (
                f"proposals don't pay: with {self.acceptance_rate:.0%} of them accepted, rounds give {max(gains[1:]):.2g} "
                f"x the tokens/s of plain steps; next try after {self._pause} tokens"
            )
        elif best and self._outcomes >= PROVEN:
            self._next_pause = SHORTEST_PAUSE
        return best

    def _tokens(self, proposals: int) -> float:
        return sum(self.acceptance_rate**i for i in range(proposals + 1))

    def _costs(self) -> dict[int, float]:
        """Seconds by k, of the kinds that were measured often enough and lately."""
        recent = {k: [s for when, s in seconds if when > self._passes - STALE] for k, seconds in self._seconds.items()}
        return {k: median(seconds) for k, seconds in recent.items() if len(seconds) >= SAMPLES}


def _between(costs: dict[int, float], k: int) -> float:
    """The seconds of k proposals; if they weren't measured, from the line between the nearest k that were. Beyond the
    largest k that was measured its own seconds are taken: that more look cheap is why they are tried."""
    below = max(known for known in costs if known <= k)
    above = min((known for known in costs if known > k), default=None)
    if above is None or below == k:
        return costs[below]
    share = (k - below) / (above - below)
    return costs[below] * (1 - share) + costs[above] * share
