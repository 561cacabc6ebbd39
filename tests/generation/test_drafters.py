"""Drafters: prompt lookup against a naive search, draft models; how many tokens are drafted, for simulated times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Context, LoadedModel
from mlxlm.generation.drafters import MAX_CANDIDATES, DraftModel, PromptLookup, max_trimmable_tokens
from mlxlm.generation.speculative import LONGEST_PAUSE, PLAIN_STEPS, SHORTEST_PAUSE, DraftLengthController
from mlxlm.tokenizer import train
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import Greedy
from tests.generation.reference_decoding import STATE_SPACE, mlx_lm_model


def naive(ids, count):
    """What follows the latest earlier occurrence of the longest suffix of at least two tokens."""
    best, longest = None, 1
    for place in range(len(ids) - 1, 1, -1):
        length = 0
        while length < place and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        if length > longest:
            best, longest = place, length
    if best is None:
        return None
    found = list(ids)
    for _ in range(count):  # possibly into the draft itself
        found.append(found[best])
        best += 1
    return found[len(ids) :]


def proposed(draft_state, count):
    found = draft_state.propose(count, None, 10)
    return None if found is None else found.tolist()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=MAX_CANDIDATES), st.integers(1, 6))
def test_lookup_proposes_what_followed_the_longest_suffix(ids, count):
    draft_state = PromptLookup().begin(None, KVOptions(), ids)
    if draft_state.last_draft_matched:  # it continues its match, even if there is a longer one
        return
    assert proposed(draft_state, count) == naive(ids, count)


def test_lookup_reports_whether_its_draft_matched():
    draft_state = PromptLookup().begin(None, KVOptions(), [1, 2, 3, 4, 5, 6, 7])
    assert proposed(draft_state, 3) is None and draft_state.last_draft_matched is False
    draft_state.read([3])
    assert proposed(draft_state, 3) is None
    draft_state.read([4])
    assert draft_state.last_draft_matched is False and proposed(draft_state, 3) == [5, 6, 7]
    draft_state.read([5])
    assert draft_state.last_draft_matched is True and proposed(draft_state, 3) == [6, 7, 3]
    draft_state.read([9])
    assert draft_state.last_draft_matched is False and proposed(draft_state, 3) is None


def test_the_latest_of_equally_long_suffixes_counts_and_a_longer_one_wins():
    assert proposed(PromptLookup().begin(None, KVOptions(), [1, 2, 3, 0, 1, 2, 4, 0, 5, 1, 2]), 1) == [4]
    assert proposed(PromptLookup().begin(None, KVOptions(), [0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2]), 1) == [3]


def test_lookup_compares_a_bounded_number_of_positions():
    draft_state = PromptLookup().begin(None, KVOptions(), [1, 2] * 5000)
    assert max(len(places) for places in draft_state._positions.values()) <= MAX_CANDIDATES


def test_a_draft_model_with_another_tokenizer_is_refused(lm):
    other = LoadedModel(lm.model, train(["another text " * 50], 270), lm.config, lm.path)
    with pytest.raises(GenerationError, match="another tokenizer"):
        DraftModel(other).check(lm)
    DraftModel(lm).check(lm)
    PromptLookup().check(lm)


def test_a_draft_model_whose_cache_cannot_be_trimmed_is_refused(lm):
    model = mlx_lm_model("mamba", **STATE_SPACE)
    draft = DraftModel(LoadedModel(model, lm.tokenizer, lm.config, lm.path))
    with pytest.raises(GenerationError, match="cache .* can.t be trimmed"):
        draft.begin(None, KVOptions(), [1, 2, 3])


def test_a_draft_model_stops_at_its_context_length(lm):
    config = lm.config.with_changes(max_position_embeddings=32)
    draft = DraftModel(LoadedModel(lm.model, lm.tokenizer, config, lm.path))
    prompt = list(range(1, 28))
    draft_state = draft.begin(None, KVOptions(), prompt)
    assert draft_state.propose(8, Greedy(), 300).size == 5
    draft_state.read([9] * 10)
    assert draft_state.propose(8, Greedy(), 300) is None and draft_state.last_draft_matched is False
    draft_state.close()
    draft_state = draft.begin(None, KVOptions(size=64, keep=2), prompt)
    for _ in range(20):
        found = draft_state.propose(3, Greedy(), 300)
        assert 1 <= found.size <= 3
        draft_state.read([9, 4, 5, 6])
        assert max(cache.size() for cache in draft_state._context.caches) <= 32
    draft_state.close()


@pytest.mark.parametrize("size", [250, 300, 310])
def test_a_padded_vocabulary_gets_the_width_of_the_other(lm, size):
    class Checked(Greedy):
        def __call__(self, logits):
            assert logits.shape == (1, size)
            return super().__call__(logits)

    draft_state = DraftModel(lm).begin(None, KVOptions(), [1, 2, 3])
    draft_state.read([4])
    assert max(draft_state.propose(4, Checked(), size).tolist()) < min(size, 300)


def test_max_trimmable_tokens(lm):
    assert max_trimmable_tokens(Context(lm.model).caches, 7) == 7
    rotating = Context(lm.model, KVOptions(size=20, keep=2))  # drops 2 at a time
    rotating.read(list(range(1, 16)))
    assert max_trimmable_tokens(rotating.caches, 9) == 5
    rotating.read(list(range(1, 10)))
    before = rotating.caches[0].offset
    n = max_trimmable_tokens(rotating.caches, 9)
    assert 1 <= n <= 2
    rotating.model(mx.array([[5] * n]), cache=rotating.caches)
    assert rotating.caches[0].can_trim(n) and rotating.caches[0].trim(n) == n
    assert rotating.caches[0].offset == before


class Machine:
    """Decodes with a Pace; counts tokens and seconds. A round of k takes 1 + k * `each` plain steps."""

    def __init__(self, num_draft_tokens, each, right, free=False, seed=0):
        self.controller, self.each, self.right, self.free = DraftLengthController(num_draft_tokens), each, right, free
        self.rng = random.Random(seed)
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
    assert first == 2 * PLAIN_STEPS and machine.rounds[first] == 1
    assert max(machine.rounds) == 16 and machine.rounds[-1] >= 14


def test_pauses_get_longer_if_drafts_do_not_pay():
    machine = Machine(8, 0.3, 0.05).run(200)
    assert machine.rounds[-1] == 0
    assert "don't pay" in machine.controller.reason and "% of them accepted" in machine.controller.reason
    machine.run(4000)
    tries = sum(k > 0 and before == 0 for before, k in zip(machine.rounds, machine.rounds[1:], strict=False))
    assert 4 < tries <= 3 + 4000 / LONGEST_PAUSE + 5
    assert machine.speed > 0.97


@pytest.mark.parametrize("right", [0.1, 0.25])
def test_a_short_text_hardly_loses(right):
    """What the tries cost that don't pay, with passes as on two cores."""
    speeds = [Machine(8, 0.4, right, seed=seed).run(192).speed for seed in range(100)]
    assert sum(speeds) / len(speeds) > 0.977


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
