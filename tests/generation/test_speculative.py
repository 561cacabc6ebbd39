"""Speculation changes no token: against the plain engine, with right, wrong and mixed guesses, on every cache."""

import pytest

from mlxlm._mlx import mx, tree_map
from mlxlm.cache import KVOptions
from mlxlm.errors import GenerationError
from mlxlm.generation import Context, GenerationOptions, LoadedModel, TextStream, tokens
from mlxlm.generation.drafts import DraftModel, NgramLookup
from mlxlm.generation.speculative import Speculation
from mlxlm.model import Decoder

PROMPT = [5, 9, 200, 17, 33, 33, 90, 41, 7, 123, 64]
CACHES = {
    "full": KVOptions(),
    "rotating": KVOptions(size=48, keep=4),
    "rotating, tiny": KVOptions(size=26, keep=2),
}


class Greedy:
    """The least that a Sampler is: greedy, and a count of what was committed."""

    blocks, finished = False, False

    def __init__(self, log=None):
        self.committed, self.observed = 0, []

    def __call__(self, logits):
        self.committed += 1
        return mx.argmax(logits, axis=-1)

    def ahead(self, logits, draft):
        ranked = mx.sort(logits, axis=-1)
        return mx.argmax(logits, axis=-1), ranked[:, -1] - ranked[:, -2]

    def advance(self, drawn):
        self.committed += drawn.size

    def observe(self, token):
        self.observed.append(token)

    def fork(self):
        return Greedy()


class Oracle:
    """Proposes the text that is to come, with every `wrong`-th token (0: none) another one; at most `count` a time."""

    right, behind = None, 0

    def __init__(self, text, wrong=0):
        self.text, self.wrong, self.position = text, wrong, 0

    def begin(self, context, prompt, max_tokens):
        self.position = -len(prompt)
        self.read(prompt)
        return self

    def check(self, loaded):
        pass

    def read(self, known):
        for token in known:
            if 0 <= self.position < len(self.text):  # behind its end, more may be drawn before it is closed
                assert token == self.text[self.position]
            self.position += 1

    def propose(self, count, sampler, vocab_size):
        rows = range(self.position, min(self.position + count, len(self.text)))
        guesses = [(self.text[i] + (1 if self.wrong and i % self.wrong == 0 else 0)) % vocab_size for i in rows]
        return mx.array(guesses, mx.int32) if guesses else None

    def close(self):
        self.closed = True


class Always:
    """A Pace that always proposes `count`."""

    reason = None

    def __init__(self, count):
        self.count = count

    def choose(self):
        return self.count

    def outcome(self, accepted, refused):
        pass

    def took(self, proposals, seconds):
        pass


def always(drafter, count):
    speculation = Speculation(drafter, most=count)
    speculation._pace = Always(count)
    return speculation


@pytest.fixture(scope="module")
def soft(loaded):
    """A model whose logits are near enough to each other for sampling, with heads that can be quantized."""
    config = loaded.config.with_changes(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    model = Decoder(config)
    model.initialize(seed=5)
    model.lm_head.weight = model.lm_head.weight * 6
    mx.eval(model.parameters())
    return LoadedModel(model, loaded.tokenizer, config, loaded.path)


def disturbed(model, share):
    """A model that agrees with `model` often, not always."""
    other = Decoder(model.config)
    noise = iter(mx.random.split(mx.random.key(1), 100))
    other.update(tree_map(lambda w: w * (1 + share * mx.random.normal(w.shape, key=next(noise))), model.parameters()))
    return other


def exact(context):
    return {cache.offset for cache in context.caches} == {len(context.ids)}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("wrong", [0, 1, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_token_and_every_yield_is_that_of_the_plain_engine(loaded, kind, wrong, count):
    plain, ours = Context(loaded.model, CACHES[kind]), Context(loaded.model, CACHES[kind])
    wanted = list(tokens(plain, PROMPT, Greedy(), 70))
    speculation, sampler = always(Oracle(wanted, wrong), count), Greedy()
    found = []
    for token in speculation.tokens(ours, PROMPT, sampler, 70):
        found.append(token)
        assert sampler.observed == found
        assert ours.ids == PROMPT + (found if len(found) < 70 else found[:-1])
        assert exact(ours)
    assert found == wanted and ours.ids == plain.ids
    assert sampler.committed == 70
    if kind == "full":
        stats = speculation.stats
        assert stats.rounds and stats.accepted <= stats.proposed
        assert wrong or stats.accepted == stats.proposed
        assert wrong != 1 or stats.accepted == 0


@pytest.mark.parametrize("kind", CACHES)
def test_a_draft_model_that_is_the_model_is_always_right(loaded, kind):
    wanted = list(tokens(Context(loaded.model, CACHES[kind]), PROMPT, Greedy(), 60))
    speculation = always(DraftModel(loaded), 5)
    assert list(speculation.tokens(Context(loaded.model, CACHES[kind]), PROMPT, Greedy(), 60)) == wanted
    stats = speculation.stats
    assert stats.accepted == stats.proposed > (0 if kind == "rotating, tiny" else 40)


# The real sampler, through TextStream


def text(loaded, speculation, kv=None, prompt=PROMPT, **options):
    stream = TextStream(loaded, prompt, GenerationOptions.of(**options), kv=kv, speculation=speculation)
    return list(stream), stream.result


OPTIONS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "typical": {"temperature": 1.2, "typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {7: 3.0, 9: -50.0}},
    "dry": {"temperature": 1.0, "dry_multiplier": 0.8, "dry_breakers": ()},
}
KINDS = {
    "full": KVOptions(),
    "rotating": KVOptions(size=60, keep=4),
    "8 bits": KVOptions(key_bits=8, value_bits=8),
    "rotating, 8 and 4 bits": KVOptions(size=60, keep=4, key_bits=8, value_bits=4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_text_and_logprobs_are_those_without_speculation(soft, name, kind):
    draft = LoadedModel(disturbed(soft.model, 0.05), soft.tokenizer, soft.config, soft.path)
    for seed in range(3):
        options = {**OPTIONS[name], "seed": seed, "max_tokens": 60, "logprobs": 2}
        _, wanted = text(soft, None, KINDS[kind], **options)
        for drafter in (DraftModel(draft), NgramLookup(), Oracle(wanted.tokens, wrong=4)):
            speculation = always(drafter, 5)
            chunks, found = text(soft, speculation, KINDS[kind], **options)
            assert found.tokens == wanted.tokens and found.text == wanted.text
            assert found.finish_reason == wanted.finish_reason
            assert [c.logprob for c in chunks] == found.logprobs
            for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
                assert ours.token == theirs.token
                assert ours.logprob == pytest.approx(theirs.logprob, abs=0.02)
            if not isinstance(drafter, NgramLookup):
                assert speculation.stats.accepted > 0


@pytest.mark.parametrize("taken", [1, 2, 3, 7, 20])
def test_leaving_anywhere_is_exact_and_the_text_goes_on_from_there(loaded, taken):
    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 40))
    context = Context(loaded.model)
    stream = always(Oracle(wanted, 6), 5).tokens(context, PROMPT, Greedy(), 40)
    found = [next(stream) for _ in range(taken)]
    stream.close()
    assert context.ids == PROMPT + found and exact(context)
    rest = tokens(context, PROMPT + found, Greedy(), 40 - taken)
    assert found + list(rest) == wanted
    assert context.ids == PROMPT + wanted[:-1]


def test_a_text_whose_context_another_one_used_does_not_go_on(loaded):
    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 40))
    context, speculation = Context(loaded.model), always(Oracle(wanted), 5)
    left = speculation.tokens(context, PROMPT, Greedy(), 40)
    found = [next(left) for _ in range(9)]
    again = list(tokens(context, PROMPT + found, Greedy(), 31))
    with pytest.raises(GenerationError, match="another text"):
        next(left)
    assert found + again == wanted and context.ids == PROMPT + wanted[:-1] and exact(context)


def test_a_text_left_behind_can_be_closed_late(loaded):
    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 40))
    context = Context(loaded.model)
    left = always(Oracle(wanted), 5).tokens(context, PROMPT, Greedy(), 40)
    found = [next(left) for _ in range(9)]
    again = list(tokens(context, PROMPT + found, Greedy(), 31))
    left.close()
    assert found + again == wanted and context.ids == PROMPT + wanted[:-1] and exact(context)


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_pass_goes_beyond_the_limit(loaded, limit):
    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 20))
    context = Context(loaded.model)
    speculation = always(Oracle(wanted), 8)
    assert list(speculation.tokens(context, PROMPT, Greedy(), limit)) == wanted[:limit]
    assert context.ids == PROMPT + wanted[: limit - 1] and exact(context)


class Failing(Greedy):
    """Fails like a Ctrl-C at the n-th pass."""

    def __init__(self, n):
        super().__init__()
        self.passes = n

    def __call__(self, logits):
        self.count()
        return super().__call__(logits)

    def ahead(self, logits, draft):
        self.count()
        return super().ahead(logits, draft)

    def count(self):
        self.passes -= 1
        if self.passes == 0:
            raise KeyboardInterrupt

    def fork(self):
        return self


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 9, 12])
def test_an_interrupt_in_a_pass_leaves_empty_contexts_that_work_again(loaded, n):
    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 20))
    speculation, context = always(DraftModel(loaded), 3), Context(loaded.model)
    with pytest.raises(KeyboardInterrupt):
        list(speculation.tokens(context, PROMPT, Failing(n), 20))
    assert context.ids == [] and exact(context)
    assert list(speculation.tokens(context, PROMPT, Greedy(), 20)) == wanted
    assert speculation.stats.accepted == speculation.stats.proposed > 0


def test_a_draft_reads_a_prompt_once_and_a_longer_one_from_where_it_departs(loaded):
    calls = []

    class Counting:
        layers = loaded.model.layers

        def __call__(self, ids, cache):
            calls.append(ids.shape[1])
            return loaded.model(ids, cache=cache)

    draft = DraftModel(LoadedModel(Counting(), loaded.tokenizer, loaded.config, loaded.path))
    speculation, context = always(draft, 3), Context(loaded.model)
    found = list(speculation.tokens(context, PROMPT, Greedy(), 20))
    assert sum(calls) <= len(PROMPT) + 20
    calls.clear()
    longer = PROMPT + found + [8, 9]
    again = list(speculation.tokens(context, longer, Greedy(), 20))
    assert again == list(tokens(Context(loaded.model), longer, Greedy(), 20))
    assert sum(calls) <= 3 + 2 + 20


def test_two_texts_of_one_speculation_at_once(loaded):
    prompts = [PROMPT, PROMPT[:6] + [3, 4]]
    wanted = [list(tokens(Context(loaded.model), prompt, Greedy(), 25)) for prompt in prompts]
    speculation = always(DraftModel(loaded), 4)
    streams = [speculation.tokens(Context(loaded.model), prompt, Greedy(), 25) for prompt in prompts]
    assert [list(pair) for pair in zip(*zip(*streams, strict=True), strict=True)] == wanted
    assert speculation.stats.proposed


def test_close_draws_are_decided_by_a_plain_step(loaded):
    """All logits are made nearly equal: then every draw is close."""

    class Flat(Greedy):
        def ahead(self, logits, draft):
            drawn, gaps = super().ahead(logits, draft)
            return drawn, gaps * 0 + 1e-4

    wanted = list(tokens(Context(loaded.model), PROMPT, Greedy(), 30))
    speculation, context, sampler = always(Oracle(wanted), 4), Context(loaded.model), Flat()
    found = []
    for token in speculation.tokens(context, PROMPT, sampler, 30):
        found.append(token)
        assert context.ids == PROMPT + (found if len(found) < 30 else found[:-1]) and exact(context)
    assert found == wanted and sampler.committed == 30
    assert speculation.stats.decided_again == speculation.stats.rounds > 0
    assert speculation.stats.accepted == 0


def test_stop_strings_and_end_tokens_inside_a_round(soft):
    _, plain = text(soft, None, temperature=0, max_tokens=40)
    stop = plain.text[12:15]
    for options in ({"stop": stop}, {"stop": (stop, "zzz")}):
        context = Context(soft.model)
        stream = TextStream(
            soft, PROMPT, GenerationOptions.of(temperature=0, max_tokens=40, **options), context=context,
            speculation=always(Oracle(plain.tokens), 8),
        )  # fmt: skip
        shown = "".join(chunk.text for chunk in stream)
        _, wanted = text(soft, None, temperature=0, max_tokens=40, **options)
        assert shown == stream.result.text == wanted.text and wanted.finish_reason == "stop"
        assert stream.result.tokens == wanted.tokens
        assert context.ids == PROMPT + wanted.tokens and exact(context)
