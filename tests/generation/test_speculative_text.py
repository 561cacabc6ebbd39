"""Speculation through whole texts: every option and cache gives the text, the ends and the log-probabilities of plain
decoding."""

import json

import pytest

from mlxlm.backend.mlx import ON_CPU, mx, tree_map
from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, Request, Sampler
from mlxlm.generation.drafters import DraftModel, PromptLookup
from mlxlm.generation.speculative import MAX_DRAFT_TOKENS, SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import FixedLength, Oracle, always, perturbed
from tests.generation.reference_decoding import (
    PROMPT,
    STATE_SPACE,
    Counting,
    batch_of_one,
    decode,
    greedy_sampler,
    held,
    mlx_lm_model,
)


@pytest.fixture(scope="module")
def soft(lm):
    """A model whose logits are near enough to each other for sampling, with heads that can be quantized."""
    config = lm.config.with_changes(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    model = Decoder(config)
    model.init_weights(seed=5)
    model.lm_head.weight = model.lm_head.weight * 6
    mx.eval(model.parameters())
    return LoadedModel(model, lm.tokenizer, config, lm.path)


def text(lm, speculation, kv=None, prompt=PROMPT, **options):
    engine = Engine(lm, kv=kv, speculation=speculation, prefix_cache_bytes=0)
    options = GenerationOptions.of(deterministic=False, **options)  # others have no drafts on a GPU
    stream = engine.submit(Request(prompt, options))
    return list(stream), stream.result()


OPTIONS = {
    "greedy": {"temperature": 0},
    "filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "xtc, penalties": {
        "temperature": 1.2, "xtc_probability": 0.3, "xtc_threshold": 0.05,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.4,
    },
    "typical": {"temperature": 1.2, "typical_p": 0.8},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {7: 3.0, 9: -50.0}},
    "dry": {"temperature": 1.0, "dry_multiplier": 0.8, "dry_sequence_breakers": ()},
}  # fmt: skip
KINDS = {
    "full": KVOptions(),
    "rotating": KVOptions(size=24, keep=4),
    "8 bits": KVOptions(key_bits=8, value_bits=8),
    "rotating, 8 and 4 bits": KVOptions(size=24, keep=4, key_bits=8, value_bits=4),
}


def both(name):
    """The options `name` with every kind of cache, or with the simplest and the most complex one."""
    kinds = KINDS if name == "filters" else ("full", "rotating, 8 and 4 bits")
    return [(name, kind) for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), [pair for name in OPTIONS for pair in both(name)])
def test_text_and_logprobs_are_those_without_speculation(soft, name, kind):
    draft = LoadedModel(perturbed(soft.model, 0.05), soft.tokenizer, soft.config, soft.path)
    options = {**OPTIONS[name], "seed": 0, "max_tokens": 20, "logprobs": 2}
    _, wanted = text(soft, None, KINDS[kind], **options)
    for drafter in (DraftModel(draft), PromptLookup(), Oracle(wanted.tokens, wrong=4)):
        speculation = always(drafter, 5)
        chunks, found = text(soft, speculation, KINDS[kind], **options)
        assert found.tokens == wanted.tokens and found.text == wanted.text
        assert found.finish_reason == wanted.finish_reason
        assert [c.logprob for c in chunks] == found.logprobs
        for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=0.02)
        if not isinstance(drafter, PromptLookup):
            # Whatever typical sampling draws could be changed by rounding, which is only tested on a CPU.
            assert (speculation.stats.accepted > 0) == ("typical" not in name or not ON_CPU)


@pytest.mark.parametrize(("dtype", "kind"), [(mx.float16, "full"), (mx.bfloat16, "full"), (mx.bfloat16, "8 bits")])
def test_half_precision(soft, dtype, kind):
    """The same text; and on a CPU, which computes each row by itself, few draws are too close to be believed."""
    model = Decoder(soft.config)
    model.update(tree_map(lambda weight: weight.astype(dtype), soft.model.parameters()))
    half = LoadedModel(model, soft.tokenizer, soft.config, soft.path)
    _, wanted = text(half, None, KINDS[kind], temperature=1.0, seed=2, max_tokens=40)
    speculation = always(Oracle(wanted.tokens), 5)
    assert text(half, speculation, KINDS[kind], temperature=1.0, seed=2, max_tokens=40)[1].tokens == wanted.tokens
    if ON_CPU and kind == "full":
        assert speculation.stats.num_redecoded <= 1


def test_stop_strings_and_end_tokens_inside_a_round(soft):
    _, plain = text(soft, None, temperature=0, max_tokens=40)
    stop = plain.text[12:15]
    for options in ({"stop": stop}, {"stop": (stop, "zzz")}):
        speculation = always(Oracle(plain.tokens), 8)
        engine = Engine(soft, speculation=speculation)
        stream = engine.submit(Request(PROMPT, GenerationOptions.of(temperature=0, max_tokens=40, **options)))
        shown = "".join(chunk.text for chunk in stream)
        _, wanted = text(soft, None, temperature=0, max_tokens=40, **options)
        assert shown == stream.result().text == wanted.text and wanted.finish_reason == "stop"
        assert stream.result().tokens == wanted.tokens
        # The rest of the round is forgotten, and all of the text is kept.
        longer = [*PROMPT, *wanted.tokens, 50]
        speculation.drafters = [Oracle([])]
        again = engine.submit(Request(longer, GenerationOptions(temperature=0, max_tokens=5))).result()
        assert again.cached_tokens == len(longer) - 1
        assert again.tokens == text(soft, None, prompt=longer, temperature=0, max_tokens=5)[1].tokens


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "[a-z ]{3,25}[.!]", "stop": ("e", "a")},
        {"choice": ("the quick brown fox", "the lazy dog", "How are you?")},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
                         "required": ["a", "b"], "additionalProperties": False}},
    ],
)  # fmt: skip
def test_constraints(soft, constraint):
    draft = LoadedModel(perturbed(soft.model, 0.05), soft.tokenizer, soft.config, soft.path)
    accepted = 0
    for seed in range(1):
        options = {"temperature": 0.8, "seed": seed, "max_tokens": 60, **constraint}
        _, wanted = text(soft, None, **options)
        for drafter in (DraftModel(draft), PromptLookup(), Oracle(wanted.tokens, wrong=5)):
            speculation = always(drafter, 4)
            _, found = text(soft, speculation, **options)
            assert (found.tokens, found.text, found.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
            assert found.constraint_error == wanted.constraint_error
            accepted += speculation.stats.accepted
        if "json_schema" in constraint and wanted.constraint_error is None:
            json.loads(found.text)
    assert accepted > 2


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba"])
def test_architectures_of_mlx_lm(lm, kind):
    """A sliding window that fills up, and states that can't be taken back, with which there are no guesses."""
    model = mlx_lm_model(kind, **STATE_SPACE, sliding_window=24, sliding_window_pattern=2)
    foreign = LoadedModel(model, lm.tokenizer, lm.config, lm.path)
    options = {"temperature": 0.5, "seed": 1, "max_tokens": 40}
    _, wanted = text(foreign, None, **options)
    speculation = always(Oracle(wanted.tokens, wrong=4), 4)
    _, found = text(foreign, speculation, **options)
    assert found.tokens == wanted.tokens
    stats = speculation.stats
    assert (stats.accepted > 0) == stats.active == (kind == "gemma3_text")
    assert stats.active or "can't be trimmed" in stats.reason


def test_a_model_with_windows(lm):
    config = lm.config.with_changes(sliding_window=16, layer_types=("sliding_attention", "full_attention"))
    model = Decoder(config)
    model.init_weights(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20
    windowed = LoadedModel(model, lm.tokenizer, config, lm.path)
    _, wanted = text(windowed, None, temperature=0, max_tokens=110)
    speculation = always(Oracle(wanted.tokens, wrong=7), MAX_DRAFT_TOKENS)
    _, found = text(windowed, speculation, temperature=0, max_tokens=110)
    assert found.tokens == wanted.tokens and speculation.stats.accepted > 60


def test_dynamic_rope(lm):
    """ "dynamic" ones, beyond the model's context: tokens read together would be turned otherwise than one by one."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = lm.config.with_changes(max_position_embeddings=32, rope_scaling=scaling)
    model = Decoder(config)
    model.init_weights(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20
    dynamic, kv = LoadedModel(model, lm.tokenizer, config, lm.path), KVOptions(size=30, keep=0)
    _, wanted = text(dynamic, None, kv, temperature=0, max_tokens=80)
    speculation = always(Oracle(wanted.tokens), 6)
    _, found = text(dynamic, speculation, kv, temperature=0, max_tokens=80)
    assert found.tokens == wanted.tokens and len(wanted.tokens) == 80
    assert speculation.stats.accepted > 8 and "positions" in speculation.stats.reason


@pytest.mark.parametrize("num_draft_tokens", [0, MAX_DRAFT_TOKENS + 1])
def test_an_invalid_number_of_draft_tokens(num_draft_tokens):
    with pytest.raises(GenerationError, match="num_draft_tokens is"):
        SpeculativeDecoder(PromptLookup(), num_draft_tokens=num_draft_tokens)


def test_no_guess_is_reported(soft):
    """All tokens differ, so there is nothing to look up."""
    _, found = text(soft, always(PromptLookup(), 4), temperature=0, max_tokens=12, repetition_penalty=100.0)
    assert len(set(found.tokens)) == 12 and found.speculation.proposed == 0
    assert not found.speculation.active and "no guess" in found.speculation.reason


def test_measured_draft_lengths(soft):
    options = {"temperature": 0, "max_tokens": 60}
    _, wanted = text(soft, None, **options)
    for drafter in (DraftModel(soft), PromptLookup()):
        speculation = SpeculativeDecoder(drafter)
        _, found = text(soft, speculation, **options)
        assert found.tokens == wanted.tokens
        stats = found.speculation
        assert stats is speculation.stats and stats.accepted <= stats.proposed
        assert stats.active or stats.reason
        assert stats.acceptance_rate is None if not stats.proposed else 0 <= stats.acceptance_rate <= 1


class Outcomes(FixedLength):
    """Also notes how many drafted tokens were accepted."""

    def __init__(self, count):
        super().__init__(count)
        self.accepted = 0

    def record_acceptance(self, accepted, rejected):
        self.accepted += accepted


def test_the_second_drafter_drafts_where_the_first_has_no_guess(soft):
    options = {"temperature": 0, "max_tokens": 60}
    _, wanted = text(soft, None, **options)
    speculation = SpeculativeDecoder(PromptLookup(), Oracle(wanted.tokens, wrong=5))
    speculation._draft_lengths = first, second = Outcomes(3), Outcomes(4)
    _, found = text(soft, speculation, **options)
    assert found.tokens == wanted.tokens
    assert first.accepted > 2 and second.accepted > 2
    first.count = second.accepted = 0  # as in a pause
    assert text(soft, speculation, **options)[1].tokens == wanted.tokens and second.accepted > 40


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
