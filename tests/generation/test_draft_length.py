"""How many tokens are proposed: simulated drafters and times."""

import random

import pytest

from mlxlm.generation.speculative import LONGEST_PAUSE, PLAIN_STEPS, SHORTEST_PAUSE, DraftLengthController


class Machine:
    """Decodes with a Pace; counts tokens and seconds. A round of k takes 1 + k * `each` plain steps."""

    def __init__(self, num_draft_tokens, each, right, free=False):
        self.controller, self.each, self.right, self.free = DraftLengthController(num_draft_tokens), each, right, free
        self.rng = random.Random(0)
        self.tokens = self.seconds = 0
        self.rounds: list[int] = []

    def run(self, passes):
        for _ in range(passes):
            k = self.controller.next_draft_length()
            self.rounds.append(k)
            accepted = 0
            while accepted < k and self.rng.random() < self.right:
                accepted += 1
            if k:
                self.controller.record_acceptance(accepted, int(accepted < k))
            elif self.free:
                hit = self.rng.random() < self.right
                self.controller.record_acceptance(int(hit), int(not hit))
            seconds = (1 + k * self.each) * self.rng.uniform(0.9, 1.1)
            self.controller.record_time(k, seconds)
            self.tokens, self.seconds = self.tokens + accepted + 1, self.seconds + seconds
        return self

    @property
    def speed(self):
        """Times that of plain steps."""
        return self.tokens / self.seconds


def best_speed(num_draft_tokens, each, right):
    return max(sum(right**i for i in range(k + 1)) / (1 + k * each) for k in range(num_draft_tokens + 1))


@pytest.mark.parametrize(("each", "right"), [(0.03, 0.5), (0.03, 0.95), (0.2, 0.1), (0.2, 0.8), (0.6, 0.8)])
def test_the_speed_is_near_the_best_possible(each, right):
    assert Machine(16, each, right).run(2000).speed > 0.92 * best_speed(16, each, right)


def test_plain_steps_are_measured_first():
    machine = Machine(16, 0.05, 1.0).run(40)
    first = machine.rounds.index(next(k for k in machine.rounds if k))
    assert first == 2 * PLAIN_STEPS and machine.rounds[first] == 4
    assert max(machine.rounds) == 16 and machine.rounds[-1] >= 14


def test_pauses_get_longer_if_drafts_do_not_pay():
    machine = Machine(8, 0.3, 0.05).run(200)
    assert machine.rounds[-1] == 0
    assert "don't pay" in machine.controller.reason and "% of them accepted" in machine.controller.reason
    machine.run(4000)
    tries = sum(k > 0 and before == 0 for before, k in zip(machine.rounds, machine.rounds[1:], strict=False))
    assert 4 < tries <= 3 + 4000 / LONGEST_PAUSE + 5
    assert machine.speed > 0.97


def test_drafting_resumes_when_drafts_pay_again():
    machine = Machine(8, 0.1, 0.02).run(300)
    assert machine.rounds[-1] == 0
    machine.right = 0.9
    machine.run(2 * LONGEST_PAUSE)
    assert sum(k > 0 for k in machine.rounds[-100:]) > 90


def test_outcomes_that_cost_nothing_end_a_pause():
    slow, fast = (Machine(8, 0.4, 0.02, free=free).run(1000) for free in (False, True))
    waits = []
    for machine in (slow, fast):
        assert machine.rounds[-1] == 0
        machine.right, before = 0.95, len(machine.rounds)
        machine.run(1500)
        waits.append(next(i for i, k in enumerate(machine.rounds[before:]) if k))
    assert waits[1] < SHORTEST_PAUSE < waits[0]


def test_outliers_do_not_matter():
    machine = Machine(8, 0.1, 0.8).run(100)
    for k in (4, 4, 8):
        machine.controller.record_time(k, 500.0)
    machine.run(1500)
    assert sum(machine.rounds[-200:]) > 200 * 2
