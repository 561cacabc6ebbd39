"""Speculative decoding changes no token: against plain decoding, with right, wrong and mixed drafts, on every cache."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Context, LoadedModel, generate_tokens
from mlxlm.generation.drafters import DraftModel
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import Oracle, always, exact
from tests.generation.reference_decoding import PROMPT

CACHES = {
    "full": KVOptions(),
    "rotating": KVOptions(size=36, keep=4),
    "rotating, tiny": KVOptions(size=18, keep=2),
}


class Greedy:
    """A minimal greedy Sampler that counts the accepted tokens."""

    needs_last_token = ended = False

    def __init__(self, log=None):
        self.committed, self.observed = 0, []

    def __call__(self, logits):
        self.committed += 1
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def verify_draft(self, logits, draft, margin):
        ranked = mx.sort(logits, axis=-1)
        return mx.argmax(logits, axis=-1), ranked[:, -1] - ranked[:, -2] >= margin

    def accept_draft(self, logits, drawn):
        self.committed += drawn.size

    def accept(self, token):
        self.observed.append(token)

    def fork(self):
        return Greedy()


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("wrong", "count"), [(0, 8), (4, 8), (1, 1)])
def test_tokens_and_contexts_equal_those_of_plain_decoding(lm, kind, wrong, count):
    plain, ours = Context(lm.model, CACHES[kind]), Context(lm.model, CACHES[kind])
    wanted = list(generate_tokens(plain, PROMPT, Greedy(), 36))
    speculation, sampler = always(Oracle(wanted, wrong), count), Greedy()
    found = []
    for token in speculation.generate_tokens(ours, PROMPT, sampler, 36):
        found.append(token)
        assert sampler.observed == found
        assert ours.ids == PROMPT + (found if len(found) < 36 else found[:-1])
        assert exact(ours)
    assert found == wanted and ours.ids == plain.ids
    assert sampler.committed == 36
    if kind == "full":
        stats = speculation.stats
        assert stats.rounds and stats.accepted <= stats.proposed
        assert wrong or stats.accepted == stats.proposed
        assert wrong != 1 or stats.accepted == 0


@pytest.mark.parametrize("kind", CACHES)
def test_a_draft_model_that_is_the_model_is_always_right(lm, kind):
    wanted = list(generate_tokens(Context(lm.model, CACHES[kind]), PROMPT, Greedy(), 36))
    speculation = always(DraftModel(lm), 5)
    assert list(speculation.generate_tokens(Context(lm.model, CACHES[kind]), PROMPT, Greedy(), 36)) == wanted
    stats = speculation.stats
    assert stats.accepted == stats.proposed > (0 if kind == "rotating, tiny" else 15)


@pytest.mark.parametrize("taken", [1, 2, 7, 20])
def test_a_closed_text_can_be_continued(lm, taken):
    wanted = list(generate_tokens(Context(lm.model), PROMPT, Greedy(), 40))
    context = Context(lm.model)
    stream = always(Oracle(wanted, 6), 5).generate_tokens(context, PROMPT, Greedy(), 40)
    found = [next(stream) for _ in range(taken)]
    stream.close()
    assert context.ids == PROMPT + found and exact(context)
    rest = generate_tokens(context, PROMPT + found, Greedy(), 40 - taken)
    assert found + list(rest) == wanted
    assert context.ids == PROMPT + wanted[:-1]


def test_a_text_ends_if_another_one_used_its_context(lm):
    wanted = list(generate_tokens(Context(lm.model), PROMPT, Greedy(), 40))
    context, speculation = Context(lm.model), always(Oracle(wanted), 5)
    left = speculation.generate_tokens(context, PROMPT, Greedy(), 40)
    found = [next(left) for _ in range(9)]
    again = list(generate_tokens(context, PROMPT + found, Greedy(), 31))
    with pytest.raises(GenerationError, match="another text"):
        next(left)
    assert found + again == wanted and context.ids == PROMPT + wanted[:-1] and exact(context)


def test_no_pass_goes_beyond_the_limit(lm):
    wanted = list(generate_tokens(Context(lm.model), PROMPT, Greedy(), 20))
    for limit in (1, 2, 3, 5, 8, 9, 10, 11):
        context, speculation = Context(lm.model), always(Oracle(wanted), 8)
        assert list(speculation.generate_tokens(context, PROMPT, Greedy(), limit)) == wanted[:limit]
        assert context.ids == PROMPT + wanted[: limit - 1] and exact(context)


class Failing(Greedy):
    """Fails like a Ctrl-C at the n-th pass."""

    def __init__(self, n):
        super().__init__()
        self.passes = n

    def __call__(self, logits):
        self.count()
        return super().__call__(logits)

    def verify_draft(self, logits, draft, margin):
        self.count()
        return super().verify_draft(logits, draft, margin)

    def count(self):
        self.passes -= 1
        if self.passes == 0:
            raise KeyboardInterrupt

    def fork(self):
        return self


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9])
def test_an_interrupt_in_a_pass_empties_the_contexts(lm, n):
    wanted = list(generate_tokens(Context(lm.model), PROMPT, Greedy(), 20))
    speculation, context = always(DraftModel(lm), 3), Context(lm.model)
    with pytest.raises(KeyboardInterrupt):
        list(speculation.generate_tokens(context, PROMPT, Failing(n), 20))
    assert context.ids == [] and exact(context)
    assert list(speculation.generate_tokens(context, PROMPT, Greedy(), 20)) == wanted
    assert speculation.stats.accepted == speculation.stats.proposed > 0


def test_a_draft_model_reads_only_what_is_new(lm):
    calls = []

    class Counting:
        layers = lm.model.layers

        def __call__(self, ids, cache):
            calls.append(ids.shape[1])
            return lm.model(ids, cache=cache)

    draft = DraftModel(LoadedModel(Counting(), lm.tokenizer, lm.config, lm.path))
    speculation, context = always(draft, 3), Context(lm.model)
    found = list(speculation.generate_tokens(context, PROMPT, Greedy(), 20))
    assert sum(calls) <= len(PROMPT) + 20
    calls.clear()
    longer = PROMPT + found + [8, 9]
    again = list(speculation.generate_tokens(context, longer, Greedy(), 20))
    assert again == list(generate_tokens(Context(lm.model), longer, Greedy(), 20))
    assert sum(calls) <= 3 + 2 + 20


def test_concurrent_texts_of_one_decoder(lm):
    prompts = [PROMPT, PROMPT[:6] + [3, 4]]
    wanted = [list(generate_tokens(Context(lm.model), prompt, Greedy(), 25)) for prompt in prompts]
    speculation = always(DraftModel(lm), 4)
    streams = [speculation.generate_tokens(Context(lm.model), prompt, Greedy(), 25) for prompt in prompts]
    assert [list(pair) for pair in zip(*zip(*streams, strict=True), strict=True)] == wanted
    assert speculation.stats.proposed


def test_uncertain_draws_are_decoded_again(lm):
    class Uncertain(Greedy):
        def verify_draft(self, logits, draft, margin):
            return super().verify_draft(logits, draft, mx.inf)

    wanted = list(generate_tokens(Context(lm.model), PROMPT, Greedy(), 30))
    speculation, context, sampler = always(Oracle(wanted), 4), Context(lm.model), Uncertain()
    found = []
    for token in speculation.generate_tokens(context, PROMPT, sampler, 30):
        found.append(token)
        assert context.ids == PROMPT + (found if len(found) < 30 else found[:-1]) and exact(context)
    assert found == wanted and sampler.committed == 30
    assert speculation.stats.num_redecoded == speculation.stats.rounds > 0
    assert speculation.stats.accepted == 0
