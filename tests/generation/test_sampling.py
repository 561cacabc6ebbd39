"""Sampling: the filtered distribution against a float64 reference, and the draws against that distribution."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm._mlx import mx
from mlxlm.errors import GenerationError
from mlxlm.generation import Sampler, SamplingOptions, filtered_logits

V = 50


def reference(logits, options, recent=()):
    """Probabilities `[V]` in float64, token by token from the definitions."""
    x = np.array(logits, np.float64)
    for token in set(recent):
        x[token] = x[token] * options.repetition_penalty if x[token] < 0 else x[token] / options.repetition_penalty
    x = x / options.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if options.top_k:
        p[p < np.sort(p)[::-1][: options.top_k].min()] = 0
        p /= p.sum()
    if options.top_p < 1:
        mass, kept = 0.0, 0.0
        for value in np.sort(p)[::-1]:
            if mass >= options.top_p:
                break
            mass, kept = mass + value, value
        p[p < kept] = 0
        p /= p.sum()
    p[p < options.min_p * p.max()] = 0
    return p / p.sum()


def probabilities(logits, options, recent=None):
    kept = filtered_logits(mx.array(logits)[None], options, None if recent is None else mx.array(recent))
    return np.array(mx.softmax(kept, axis=-1))[0]


some_options = st.builds(
    SamplingOptions,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 2 * V),
    top_p=st.floats(0.05, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
)


@settings(deadline=None, max_examples=150)
@given(some_options, st.integers(0, 2**32 - 1), st.lists(st.integers(0, V - 1), max_size=8))
def test_the_distribution_equals_the_reference(options, seed, recent):
    logits = np.random.default_rng(seed).normal(scale=3, size=V).astype(np.float32)
    ours = probabilities(logits, options, recent)
    strict, loose = (reference(logits, shifted(options, by), recent) for by in (-1e-5, 1e-5))
    assert set(np.flatnonzero(strict)) <= set(np.flatnonzero(ours)) <= set(np.flatnonzero(loose))
    wanted = np.where(ours > 0, loose, 0)
    np.testing.assert_allclose(ours, wanted / wanted.sum(), rtol=2e-4, atol=1e-7)


def shifted(options, by):
    """Thresholds a little stricter or looser: a token may lie between a float32 and a float64 threshold."""
    top_p = options.top_p if options.top_p == 1 else min(options.top_p + by, 1.0)
    return replace(options, top_p=top_p, min_p=options.min_p * (1 - by))


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.6, top_k=5),
        SamplingOptions(temperature=1.5, top_p=0.8),
        SamplingOptions(temperature=1.0, min_p=0.2, repetition_penalty=1.3),
    ],
)
def test_draws_follow_the_distribution(options):
    """Pearson's chi-square over 4000 draws stays below its 99.99 % quantile (normal approximation)."""
    logits = np.random.default_rng(1).normal(scale=2, size=V).astype(np.float32)
    recent = [3, 4, 4, 10]
    n = 4000
    kept = filtered_logits(mx.array(logits)[None], options, mx.array(recent))
    keys = mx.random.split(mx.random.key(5), n)
    drawn = np.array(mx.vmap(lambda key: mx.random.categorical(kept, key=key))(keys)).ravel()
    expected = n * reference(logits, options, recent)
    counts = np.bincount(drawn, minlength=V)
    assert not counts[expected == 0].any()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 3.9 * (2 * freedom) ** 0.5 + 5


def test_ties_with_the_last_kept_token_stay():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert (probabilities(logits, SamplingOptions(temperature=1.0, top_k=2)) > 0).tolist() == [True] * 4
    assert (probabilities(logits, SamplingOptions(temperature=1.0, top_p=0.5)) > 0).tolist() == [True] * 4
    assert (probabilities(logits, SamplingOptions(temperature=1.0, top_p=0.3)) > 0).tolist() == [True] + [False] * 3


@pytest.mark.parametrize("temperature", [0.001, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.linspace(-1e4, 1e4, V, dtype=np.float32)
    p = probabilities(logits, SamplingOptions(temperature=temperature))
    assert np.isfinite(p).all() and p.argmax() == V - 1


def sample(options, seed, n=20):
    sampler = Sampler(options, [1, 2, 3], seed)
    logits = mx.random.normal((n, 1, V), key=mx.random.key(0)).astype(mx.bfloat16)
    return [sampler(row).item() for row in logits]


def test_a_text_depends_on_its_seed_alone():
    options = SamplingOptions(temperature=1.0)
    first = sample(options, seed=7)
    mx.random.seed(123)  # whatever else the process draws
    mx.random.normal((10,))
    assert sample(options, seed=7) == first
    assert sample(options, seed=8) != first


def test_greedy_looks_at_the_penalty_only():
    logits = mx.array([[1.0, 3.0, 2.9, 0.0]])
    assert Sampler(SamplingOptions(temperature=0, top_k=2), [1], seed=0)(logits).item() == 1
    assert Sampler(SamplingOptions(temperature=0, repetition_penalty=1.5), [1], seed=0)(logits).item() == 2


def test_the_penalty_looks_back_over_its_window_prompt_included():
    options = SamplingOptions(temperature=0, repetition_penalty=10.0, repetition_window=2)
    sampler = Sampler(options, [0, 1], seed=0)
    logits = mx.array([[4.0, 3.0, 2.0, 1.0]])
    assert [sampler(logits).item() for _ in range(5)] == [2, 0, 1, 2, 0]


def test_all_problems_are_named_at_once_with_values_that_work():
    with pytest.raises(GenerationError) as caught:
        SamplingOptions(temperature=-1, top_k=-2, top_p=0, min_p=2, repetition_penalty=0, seed=-1, repetition_window=0)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window", "seed"):
        assert f"{name} is " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e-9}, {"temperature": "1"},
        {"top_k": 1.5}, {"top_k": True}, {"top_p": float("nan")}, {"top_p": 1.1}, {"min_p": -0.1},
        {"repetition_penalty": float("inf")}, {"seed": 2**64},
    ],
)  # fmt: skip
def test_impossible_settings(setting):
    with pytest.raises(GenerationError, match=next(iter(setting))):
        SamplingOptions(**setting)
