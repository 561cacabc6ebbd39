"""Sampling: the distribution of draws and of the noise, their seeds, and independence of the rows of a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm import generate
from mlxlm.backend.mlx import mx
from mlxlm.generation import GenerationOptions, LoadedModel, Sampler
from mlxlm.generation.drafters import DraftModel
from mlxlm.generation.gumbel_noise import _exponential, derive_seed, negative_gumbel_noise, token_noise
from mlxlm.generation.sampling import sample_batch
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import always

V = 50
LOGITS = np.random.default_rng(1).normal(scale=2, size=V).astype(np.float32)


def drawn(options, n=4000, logits=LOGITS):
    """How often each token is drawn as the first of n texts of different seeds."""
    samplers = [Sampler(options, [3, 4, 4, 10], seed) for seed in range(n)]
    tokens = sample_batch(samplers, mx.broadcast_to(mx.array(logits)[None], (n, len(logits))))
    return np.bincount(np.array(tokens), minlength=len(logits))


def assert_follows(counts, p):
    """Pearson's chi-square stays below its 99.99 % quantile (normal approximation)."""
    expected = counts.sum() * p
    assert not counts[expected == 0].any()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 3.9 * (2 * freedom) ** 0.5 + 5


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def kept(p, which):
    p = np.where(which, p, 0)
    return p / p.sum()


P = softmax(LOGITS.astype(np.float64))
RANKS = (-P).argsort().argsort()


def xtc_mixture():
    """Top choices from 0.1 are excluded in 40 % of the draws, all but the least likely."""
    top = P >= 0.1
    assert top.sum() >= 2
    without = kept(P, ~top | (P[top].min() == P))
    return 0.4 * without + 0.6 * P


def repeated(penalty):
    x = LOGITS.astype(np.float64)
    for token in (3, 4, 10):
        x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
    return softmax(x)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, P),
        ({"temperature": 2.0}, softmax(LOGITS.astype(np.float64) / 2)),
        ({"top_k": 5}, kept(P, RANKS < 5)),
        ({"min_p": 0.2}, kept(P, 0.2 * P.max() <= P)),
        ({"xtc_probability": 0.4}, xtc_mixture()),
        ({"repetition_penalty": 1.5}, repeated(1.5)),
        ({"logit_bias": {7: 4.0, 8: -1.0}}, softmax(LOGITS + 4.0 * (np.arange(V) == 7) - 1.0 * (np.arange(V) == 8))),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else "",
)
def test_draws_follow_the_distribution(options, wanted):
    assert_follows(drawn(GenerationOptions(**{"temperature": 1.0, **options})), wanted)


@pytest.mark.parametrize("seeds", [False, True])
def test_draws_that_follow_each_other_are_independent(seeds):
    """Pairs of tokens of one text, and of texts with seeds next to each other, have the product distribution."""
    p, options = np.array([0.5, 0.3, 0.2]), GenerationOptions(temperature=1.0)
    logits = mx.broadcast_to(mx.log(mx.array(p.astype(np.float32))), (4001, 3))
    if seeds:
        tokens = sample_batch([Sampler(options, [1], seed) for seed in range(4001)], logits)
    else:  # 4001 steps at once
        tokens, _ = Sampler(options, [1], seed=0).verify_draft(logits, mx.zeros(4000, mx.int32), 0)
    tokens = np.array(tokens)
    assert_follows(np.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9), np.outer(p, p).ravel())


def texts(options, seed, n=20):
    sampler = Sampler(options, [1, 2, 3], seed)
    logits = mx.random.normal((n, 1, V), key=mx.random.key(0)).astype(mx.bfloat16)
    return [sampler(row).item() for row in logits]


def test_a_text_depends_only_on_its_seed():
    options = GenerationOptions(temperature=1.0)
    first = texts(options, seed=7)
    mx.random.seed(123)  # whatever else the process draws
    mx.random.normal((10,))
    assert texts(options, seed=7) == first
    assert texts(options, seed=8) != first
    assert len({tuple(texts(options, seed)) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}) == 5


SETTINGS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.3, "top_k": 7, "typical_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0, "repetition_penalty": 1.4, "dry_multiplier": 0.9, "dry_sequence_breakers": ()},
    {
        "temperature": 0.9,
        "repetition_penalty": 1.4,
        "repetition_context_size": 5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "dry_multiplier": 0.9,
        "dry_sequence_breakers": (),
        "logit_bias": {3: 1.0},
        "logprobs": 0,
    },
]


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.sampled_from(range(len(SETTINGS))), st.integers(0, 99)), min_size=1, max_size=9),
    st.sampled_from([V, 257]),
    st.integers(0, 1000),
    st.data(),
)
def test_a_batched_row_equals_its_sampler_alone(rows, size, seed, data):
    """Bit for bit, with rows of other settings, some of which end early."""
    made = lambda: [Sampler(GenerationOptions(**SETTINGS[which]), [1, 2, 1, 2], s) for which, s in rows]  # noqa: E731
    together, alone = made(), made()
    logits = mx.random.normal((6, len(rows), size), key=mx.random.key(seed)) * 2
    live = list(range(len(rows)))
    for step in logits:
        tokens = sample_batch([together[row] for row in live], step[mx.array(live)]).tolist()
        assert tokens == [alone[row](step[row : row + 1]).item() for row in live]
        assert [together[row].pop_logprobs() for row in live] == [alone[row].pop_logprobs() for row in live]
        if len(live) > 1 and data.draw(st.booleans()):
            live.remove(data.draw(st.sampled_from(live)))


@pytest.mark.parametrize("which", range(len(SETTINGS)))
@pytest.mark.parametrize("seed", range(2))
def test_verify_draft_draws_what_single_steps_draw(which, seed):
    """Whatever part of it is taken; also with a fork."""
    options = GenerationOptions(**SETTINGS[which])
    plain, verify_draft = Sampler(options, [1, 2, 1], seed), Sampler(options, [1, 2, 1], seed)
    logits = mx.random.normal((14, V), key=mx.random.key(seed)) * 2
    wanted = [plain(row[None]).item() for row in logits]
    done = 0
    for taken in (1, 3, 5, 2):
        rows = logits[done : done + taken]
        tokens, _ = verify_draft.verify_draft(rows, mx.array(wanted[done : done + taken - 1], mx.int32), 0.002)
        assert tokens.tolist() == wanted[done : done + taken]
        fork = verify_draft.fork()
        assert [fork(row[None]).item() for row in rows] == wanted[done : done + taken]
        verify_draft.accept_draft(rows, tokens)
        done += taken
    assert [verify_draft(row[None]).item() for row in logits[done:]] == wanted[done:]
    for _ in wanted:
        assert plain.pop_logprobs() == verify_draft.pop_logprobs()


def test_a_wrong_draft_does_not_change_the_tokens_before_it():
    options = GenerationOptions(temperature=1.0, dry_multiplier=1.0, dry_sequence_breakers=(), repetition_penalty=2.0)
    logits = mx.random.normal((3, V), key=mx.random.key(1))
    wanted = [Sampler(options, [1, 2], 0)(logits[:1]).item()]
    sampler = Sampler(options, [1, 2], 0)
    tokens, _ = sampler.verify_draft(logits, mx.array([(wanted[0] + 1) % V, 5]), 0)
    assert tokens[0].item() == wanted[0]
    sampler.accept_draft(logits, tokens[:1])
    other = Sampler(options, [1, 2], 0)
    other(logits[:1])
    assert sampler(logits[1:2]).item() == other(logits[1:2]).item()


def test_greedy_ignores_filters():
    logits = mx.array([[1.0, 3.0, 2.9, 0.0]])
    options = GenerationOptions(temperature=0, top_k=2, top_p=0.1, min_p=0.9)
    assert Sampler(options, [1], seed=0)(logits).item() == 1


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9},
                                     {"typical_p": 0.9}, {"repetition_penalty": 1.2}, {"logprobs": 1}])  # fmt: skip
@pytest.mark.parametrize(
    ("value", "where", "dtype"),
    [(np.nan, [3], mx.float32), (np.inf, [3], mx.float32), (np.nan, range(V), mx.float16)],
)
def test_logits_that_are_not_numbers_are_an_error(options, value, where, dtype):
    """The other rows of the batch are unchanged."""
    broken = LOGITS.copy()
    broken[list(where)] = value
    options = GenerationOptions(**options)
    rows = [Sampler(options, [1, 2], seed) for seed in range(3)]
    logits = mx.array(np.stack([LOGITS, broken, LOGITS])).astype(dtype)
    tokens = sample_batch(rows, logits).tolist()
    first, last = (Sampler(options, [1, 2], row)(logits[row : row + 1]).item() for row in (0, 2))
    assert tokens == [first, -1, last]
    for row, token in ((rows[0], tokens[0]), (rows[2], tokens[2])):
        row.accept(token)
    with pytest.raises(GenerationError, match="the model's logits are not numbers"):
        rows[1].accept(-1)
    verified, _ = Sampler(options, [1, 2], 0).verify_draft(logits[:2], mx.array(tokens[:1]), 0.002)
    assert verified.tolist() == tokens[:2]


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"regex": "[a-z]{9,}"}, {"temperature": 0, "logprobs": 0}, {"draft": True, "regex": "[a-z]{9,}"},
                {"draft": True}],
)  # fmt: skip
def test_a_model_with_nan_logits_is_an_error(lm, options, good):
    """From the first pass on, or after `good` ones; also with a draft model."""

    class Broken:
        layers, passes = lm.model.layers, 0

        def __call__(self, ids, cache):
            self.passes += 1
            return lm.model(ids, cache=cache) * (1 if self.passes <= good else float("nan"))

    broken = LoadedModel(Broken(), lm.tokenizer, lm.config, lm.path)
    settings = {name: value for name, value in options.items() if name != "draft"}
    speculation = always(DraftModel(lm), 3) if "draft" in options else None
    with pytest.raises(GenerationError, match="not numbers"):
        generate(broken, [5], max_tokens=20, speculation=speculation, **settings)


@pytest.mark.parametrize("constraint", [{}, {"regex": "[a-z]{20}"}])
def test_a_draft_model_with_nan_logits_changes_no_token(lm, constraint):
    class Broken:
        layers = lm.model.layers

        def __call__(self, ids, cache):
            return lm.model(ids, cache=cache) * float("nan")

    broken = LoadedModel(Broken(), lm.tokenizer, lm.config, lm.path)
    wanted = generate(lm, "x", max_tokens=20, temperature=0, **constraint)
    found = generate(lm, "x", max_tokens=20, temperature=0, speculation=always(DraftModel(broken), 3), **constraint)
    assert found.tokens == wanted.tokens


def test_impossible_tokens_are_never_drawn():
    logits = mx.where(mx.arange(V) < 3, 0.0, -mx.inf)[None]
    for options in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 10, "top_p": 0.9}, {"typical_p": 0.9}):
        sampler = Sampler(GenerationOptions(**options), [1], 0)
        assert {sampler(logits).item() for _ in range(20)} <= {0, 1, 2}


def test_a_vocabulary_of_one():
    tokens, certain = Sampler(GenerationOptions(top_p=0.5), [0], 0).verify_draft(mx.zeros((2, 1)), mx.array([0]), 0.002)
    assert tokens.tolist() == [0, 0] and certain.tolist() == [True, True]


def test_a_fork_records_no_logprobs():
    sampler = Sampler(GenerationOptions(logprobs=2), [1], 0)
    fork = sampler.fork()
    assert fork(mx.array(LOGITS)[None]).item() == sampler(mx.array(LOGITS)[None]).item()
    assert fork.pop_logprobs() is None and sampler.pop_logprobs() is not None


def test_equal_logit_biases_share_a_group():
    made = [GenerationOptions(temperature=0, logit_bias={id: -11.0 * id for id in range(V)}) for _ in range(3)]
    samplers = [Sampler(options, [1], 0) for options in made]
    assert len({sampler.processor.key for sampler in samplers}) == 1
    assert (
        Sampler(GenerationOptions(temperature=0, logit_bias={1: -11.0}), [1], 0).processor.key
        != samplers[0].processor.key
    )
    for options in made:
        options.logit_bias.clear()
    assert sample_batch(samplers, mx.broadcast_to(10 * mx.arange(V), (3, V))).tolist() == [0, 0, 0]


def test_nothing_is_evaluated(monkeypatch):
    """So that step t + 1 can be dispatched before token t is read."""
    options = GenerationOptions(**SETTINGS[-1])
    sampler = Sampler(options, [1, 2], 0)
    sampler(mx.zeros((1, V)))
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, lambda *_: pytest.fail("evaluated"))
    monkeypatch.setattr(mx.array, "item", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(mx.array, "tolist", lambda *_: pytest.fail("read"))
    sampler(mx.zeros((1, V)))


def test_gumbel_noise_has_a_fine_upper_tail():
    """The 67 highest or so of 4M numbers all differ, and are as many as they should be.

    -log(u) has few values there, and unlikely tokens of a large vocabulary would be short of draws.
    """
    keys = [token_noise(5, step)[0] for step in range(16)]
    top = np.concatenate(
        [
            noise[noise > 11]
            for noise in (np.array(-negative_gumbel_noise(mx.array([key], mx.uint32), 250_000)) for key in keys)
        ]
    )
    expected = 4_000_000 * -np.expm1(-np.exp(-11))
    assert abs(len(top) - expected) < 4 * expected**0.5
    assert len(set(top.tolist())) == len(top)


def test_gumbel_noise_follows_its_distribution():
    """Kolmogorov-Smirnov distance of 100,000 numbers to exp(-exp(-x)), below its 99.99 % quantile."""
    noise = np.sort(
        np.array(-negative_gumbel_noise(mx.array([token_noise(1, 1)[0]], mx.uint32), 100_000))[0].astype(np.float64)
    )
    assert np.isfinite(noise).all()
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(100_000) + 0.5) / 100_000).max()
    assert distance < 2.23 / 100_000**0.5


def test_exponentials_are_exact_at_both_ends():
    u = np.concatenate([np.logspace(-9.9, -0.01, 2000), 1 - np.logspace(-7, -0.3, 1000)]).astype(np.float32)
    u = u[u < 1]
    np.testing.assert_allclose(np.array(_exponential(mx.array(u))), -np.log1p(-u.astype(np.float64)), rtol=4e-7)


def test_padded_vocabularies_share_their_noise():
    keys = mx.array([token_noise(1, step)[0] for step in range(3)], mx.uint32)
    small, large = negative_gumbel_noise(keys, 151_936), negative_gumbel_noise(keys, 152_064)
    assert mx.array_equal(small, large[:, :151_936])


def test_derived_seeds_differ_in_every_part():
    ids = ("1", "2", "1\n2", "\u00e9")
    seeds = {derive_seed(seed, id, sample) for seed in range(10) for id in ids for sample in range(10)}
    assert len(seeds) == 400 and all(0 <= seed < 2**53 for seed in seeds)
    assert derive_seed(1, "a", 2) == 2229106196240772  # for ever: results are made again from it
