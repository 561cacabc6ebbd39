"""Speculative decoding changes no token: against plain decoding, with right, wrong and mixed drafts, on every cache."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, Request, Sampler
from mlxlm.generation.drafters import DraftModel
from tests.generation.fake_drafters import Oracle, always
from tests.generation.reference_decoding import PROMPT, Counting, batch_of_one, decode, greedy_sampler, held

CACHES = {
    "full": KVOptions(),
    "rotating": KVOptions(size=36, keep=4),
    "rotating, tiny": KVOptions(size=18, keep=2),
}


def plain(lm, count, kv=None, prompt=PROMPT):
    return decode(*batch_of_one(lm.model, prompt, count, kv=kv))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("wrong", "count"), [(0, 8), (4, 8), (1, 1)])
def test_tokens_and_caches_equal_those_of_plain_decoding(lm, kind, wrong, count):
    wanted = plain(lm, 36, CACHES[kind])
    speculation, sampler = always(Oracle(wanted, wrong), count), greedy_sampler()
    batch, row = batch_of_one(lm.model, PROMPT, 36, kv=CACHES[kind], sampler=sampler, speculation=speculation)
    assert held(batch, row) == PROMPT[:-1]
    most = 0
    while not row.finished:
        most = max(most, batch.step())
        ids = held(batch, row)
        assert ids == row.ids[: len(ids)] and len(row) - len(ids) <= 1
    assert row.tokens.tolist() == wanted and held(batch, row) == PROMPT + wanted[:-1]
    assert sampler.step == 36
    if kind == "full":
        stats = speculation.stats
        assert stats.rounds and stats.accepted <= stats.proposed and most == (wrong or count + 1)
        assert wrong or stats.accepted == stats.proposed
        assert wrong != 1 or stats.accepted == 0


@pytest.mark.parametrize("kind", CACHES)
def test_a_draft_model_that_is_the_model_is_always_right(lm, kind):
    speculation = always(DraftModel(lm), 5)
    batch = batch_of_one(lm.model, PROMPT, 36, kv=CACHES[kind], speculation=speculation)
    assert decode(*batch) == plain(lm, 36, CACHES[kind])
    stats = speculation.stats
    assert stats.accepted == stats.proposed > (0 if kind == "rotating, tiny" else 15)


@pytest.mark.parametrize("taken", [1, 2, 7, 20])
def test_a_text_that_leaves_its_batch_can_be_continued(lm, taken):
    wanted = plain(lm, 40)
    batch, row = batch_of_one(lm.model, PROMPT, 40, speculation=always(Oracle(wanted, 6), 5))
    decode(batch, row, taken)
    ids, caches = batch.row_caches(row)
    assert ids == row.ids and {cache.offset for cache in caches} == {len(ids)}
    batch.take_out(row)
    other, _ = batch_of_one(lm.model, PROMPT, 40)
    other.take_out(other.rows[0])
    for cache in caches:
        cache.trim(1)
    other.join([row], caches)
    assert decode(other, row) == wanted and held(other, row) == PROMPT + wanted[:-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 9, 10, 11])
def test_no_pass_goes_beyond_the_limit(lm, limit):
    wanted = plain(lm, 20)
    batch, row = batch_of_one(lm.model, PROMPT, limit, speculation=always(Oracle(wanted), 8))
    assert decode(batch, row) == wanted[:limit] and held(batch, row) == PROMPT + wanted[: limit - 1]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_text_after_a_failed_pass(lm, n):
    """Nothing of the failed one is left, also not in the draft model's caches."""
    calls = []

    class Failing(Counting):
        def __call__(self, ids, cache=None):
            calls.append(1)
            if len(calls) == n:
                raise RuntimeError("out of memory")
            return super().__call__(ids, cache)

    speculation = always(DraftModel(lm), 3)
    engine = Engine(LoadedModel(Failing(lm.model), lm.tokenizer, lm.config, lm.path), speculation=speculation)
    request = Request(PROMPT, GenerationOptions(temperature=0, max_tokens=20), frozenset())
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit(request).result()
    assert engine.submit(request).result().tokens == plain(lm, 20)
    assert speculation.stats.accepted == speculation.stats.proposed > 0


def test_a_draft_model_reads_only_what_is_new(lm):
    counting = Counting(lm.model)
    speculation = always(DraftModel(LoadedModel(counting, lm.tokenizer, lm.config, lm.path)), 3)
    batch, row = batch_of_one(lm.model, PROMPT, 20, speculation=speculation)
    found = decode(batch, row)
    batch.close()
    assert sum(counting.calls) <= len(PROMPT) + 20
    counting.calls.clear()
    longer = PROMPT + found + [8, 9]
    again = decode(*batch_of_one(lm.model, longer, 20, speculation=speculation))
    assert again == plain(lm, 20, prompt=longer)
    assert sum(counting.calls) <= 3 + 2 + 20


def test_concurrent_texts_of_one_decoder(lm):
    prompts = [PROMPT, PROMPT[:6] + [3, 4]]
    speculation = always(DraftModel(lm), 4)
    batches = [batch_of_one(lm.model, prompt, 25, speculation=speculation) for prompt in prompts]
    while not all(row.finished for _, row in batches):
        for batch, row in batches:
            if not row.finished:
                batch.step()
    assert [row.tokens.tolist() for _, row in batches] == [plain(lm, 25, prompt=prompt) for prompt in prompts]
    assert speculation.stats.proposed


def test_uncertain_draws_are_decoded_again(lm):
    class Uncertain(Sampler):
        def verify_draft(self, logits, draft, margin):
            return super().verify_draft(logits, draft, mx.inf)

    wanted, sampler = plain(lm, 30), Uncertain(GenerationOptions(temperature=0), PROMPT, 0)
    speculation = always(Oracle(wanted), 4)
    batch, row = batch_of_one(lm.model, PROMPT, 30, sampler=sampler, speculation=speculation)
    assert decode(batch, row) == wanted and sampler.step == 30 and held(batch, row) == PROMPT + wanted[:-1]
    assert speculation.stats.num_redecoded == speculation.stats.rounds > 0
    assert speculation.stats.accepted == 0
