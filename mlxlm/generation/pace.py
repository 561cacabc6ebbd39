"""How many tokens to propose at a time, and whether at all: decided by what was measured."""

from __future__ import annotations

from collections import deque

PLAIN = 4  # plain steps that are measured before the first proposal
ROUNDS = 2  # and rounds of each size before they count: the first may compile something
RECENT = 8  # measurements of a kind that count; the least of them, which other work on the machine disturbs least
STALE = 256  # measurements of any kind after which an old one counts no more: a longer context costs more
MEMORY = 0.97  # weight that an outcome keeps with each later one: about the last 33 count
HOPE, HOPE_WEIGHT = 0.7, 4.0  # the acceptance that is assumed before anything was seen, and for how many outcomes
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 1024  # plain steps before another try, doubled after each that didn't pay
MEASURING = "plain steps are measured first"


class Pace:
    """Chooses the number of proposals k that gives the most tokens a second.

    If each proposal is accepted with probability a, given that those before it were, a round of k gives
    (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2023, equation 1). Its seconds, and those of a plain step, are
    measured from token to token, with everything in between. Where no k beats plain steps, none is proposed for a
    pause; then a new try begins as hopefully as the first.
    """

    def __init__(self, most: int):
        self._most = most
        self._seconds: dict[int, deque[tuple[int, float]]] = {}
        self._noted = 0
        self._pause = self._waited = 0  # plain steps of the pause that is on; 0: none is
        self._next_pause = SHORTEST_PAUSE
        self.reason = MEASURING  # why there are no proposals, where `choose` gives 0
        self._hope()

    def _hope(self) -> None:
        self._accepted, self._seen = HOPE * HOPE_WEIGHT, HOPE_WEIGHT

    @property
    def acceptance(self) -> float:
        """How probable it is that a proposal is accepted, where those before it were."""
        return self._accepted / self._seen

    def outcome(self, accepted: int, refused: int) -> None:
        """So many proposals were accepted, and one or none refused after them."""
        for hit in [1] * accepted + [0] * refused:
            self._accepted = MEMORY * self._accepted + hit
            self._seen = MEMORY * self._seen + 1

    def took(self, proposals: int, seconds: float) -> None:
        """A round of `proposals` took so long; 0 is a plain step."""
        self._noted += 1
        self._seconds.setdefault(proposals, deque(maxlen=RECENT)).append((self._noted, seconds))
        if proposals == 0 and self._pause:
            self._waited += 1
            if self._waited >= self._pause:
                self._pause = self._waited = 0
                self.reason = MEASURING
                self._seconds = {0: self._seconds[0]}
                self._hope()

    def choose(self) -> int:
        """The number of proposals of the next round; 0 for a plain step."""
        costs = self._costs()
        if self._pause or 0 not in costs:
            return 0
        gains = [self._tokens(k) * costs[0] / _between(costs, k) for k in range(self._most + 1)]
        best = max(range(self._most + 1), key=gains.__getitem__)
        if best == 0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
            self.reason = (
                f"proposals don't pay: with {self.acceptance:.0%} of them accepted, rounds give {max(gains[1:]):.2g} "
                f"x the tokens/s of plain steps; next try after {self._pause} tokens"
            )
        elif self._seen > 2 * HOPE_WEIGHT + 8:
            self._next_pause = SHORTEST_PAUSE  # it pays, and not by hope alone
        return best

    def _tokens(self, proposals: int) -> float:
        return sum(self.acceptance**i for i in range(proposals + 1))

    def _costs(self) -> dict[int, float]:
        """The least seconds of each kind, without what is stale; plain steps only once there are enough."""
        costs = {}
        for kind, seconds in self._seconds.items():
            fresh = [s for noted, s in seconds if noted > self._noted - STALE]
            if len(fresh) >= (PLAIN if kind == 0 else ROUNDS):
                costs[kind] = min(fresh)
        return costs


def _between(costs: dict[int, float], k: int) -> float:
    """The seconds of k proposals, where necessary on the line between those measured; more than the most cost nothing
    more, so that they are tried."""
    below = max(known for known in costs if known <= k)
    above = min((known for known in costs if known > k), default=None)
    if above is None or below == k:
        return costs[below]
    share = (k - below) / (above - below)
    return costs[below] * (1 - share) + costs[above] * share
