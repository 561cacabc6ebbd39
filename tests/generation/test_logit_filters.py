"""Logit filters against a float64 reference and against transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation import GenerationOptions
from mlxlm.generation.logit_filters import FilteredLogits, apply_filters, apply_temperature, filter_numbers

V = 50


def reference(logits, options):
    """Probabilities `[V]` in float64, token by token from the definitions."""
    x = np.array(logits, np.float64) / options.temperature
    if options.top_n_sigma:
        x[x < x.max() - options.top_n_sigma * x.std()] = -np.inf
    p = normalised(np.exp(x - x.max()))
    if options.top_k:
        p[p < np.sort(p)[::-1][: options.top_k].min()] = 0
        p = normalised(p)
    if options.typical_p < 1:
        surprise = np.array([-np.log(q) if q else np.inf for q in p])
        entropy = sum(q * s for q, s in zip(p, surprise, strict=True) if q)
        p = smallest_set(p, np.abs(surprise - entropy), options.typical_p)
    if options.top_p < 1:
        p = smallest_set(p, -p, options.top_p)
    p[p < options.min_p * p.max()] = 0
    return normalised(p)


def smallest_set(p, order, mass):
    sum_so_far, last = 0.0, None
    for token in np.argsort(order, kind="stable"):
        if sum_so_far >= mass:
            break
        sum_so_far, last = sum_so_far + p[token], order[token]
    return normalised(np.where(order <= last, p, 0))


def normalised(p):
    return p / p.sum()


def filter_logits(logits, options, xtc_rows=None):
    """What the tokens of all rows are drawn from."""
    numbers = filter_numbers(options, logits.shape[-1])
    scaled = apply_temperature(logits, logits.max(axis=-1, keepdims=True), options.temperature)
    return apply_filters(FilteredLogits(scaled, xtc_rows=xtc_rows), numbers).logits


def probabilities(logits, options, excluding=None):
    return np.array(mx.softmax(filter_logits(mx.array(logits)[None], options, excluding), axis=-1))[0]


some_options = st.builds(
    GenerationOptions,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 2 * V),
    top_n_sigma=st.one_of(st.just(0.0), st.floats(0.1, 4)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.9999)),  # nearer to 1, the rounding of masses decides
    typical_p=st.one_of(st.just(1.0), st.floats(0.05, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)


@settings(max_examples=200)
@given(some_options, st.integers(0, 2**32 - 1))
def test_the_distribution_equals_the_reference(options, seed):
    """Where two of the filters meet within 1e-5 of a threshold, a token may lie between float32 and float64."""
    logits = np.random.default_rng(seed).normal(scale=3, size=V).astype(np.float32)
    ours = probabilities(logits, options)
    shifts = (0, -1e-5, 1e-5)
    candidates = [reference(logits, shifted(options, a, b)) for a in shifts for b in shifts]
    wanted = next((c for c in candidates if ((c > 0) == (ours > 0)).all()), None)
    assert wanted is not None
    np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=1e-7)


def shifted(options, typical, others):
    def moved(p, by):
        return p if p == 1 else min(p + by, 1.0)

    return replace(
        options,
        typical_p=moved(options.typical_p, typical),
        top_p=moved(options.top_p, others),
        min_p=options.min_p * (1 - others),
        top_n_sigma=options.top_n_sigma * (1 - others),
    )


TIES = {
    "normal": lambda rng, size: rng.normal(scale=3, size=size),
    "ties": lambda rng, size: rng.integers(0, 4, size) / 2,
    "removed": lambda rng, size: np.where(rng.random(size) < 0.7, -np.inf, rng.normal(size=size)),
    "one candidate": lambda rng, size: np.where(np.arange(size[1]) == size[1] // 2, 1.0, np.full(size, -np.inf)),
}


@settings(max_examples=100)
@given(some_options, st.sampled_from([*TIES]), st.sampled_from([1, 2, 3, V, 257]), st.integers(0, 2**32 - 1))
def test_filters_of_a_gpu_equal_those_of_a_cpu(options, shape, size, seed):
    """Whether top-k has candidates or a threshold, and quantiles are sorted, searched or a kernel."""
    logits = TIES[shape](np.random.default_rng(seed), (2, size)).astype(np.float32)
    logits[:, seed % size] = 2.0
    results = []
    for on_cpu, max_sorted in ((ON_CPU, 8192), (ON_CPU, 0), (False, 8192)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mlxlm.backend.mlx.ON_CPU", on_cpu)
            patch.setattr("mlxlm.kernels.quantile.ON_CPU", on_cpu)
            patch.setattr("mlxlm.kernels.quantile._MAX_SORTED", max_sorted)
            results.append(np.array(filter_logits(mx.array(logits), options)))
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()
    assert np.isfinite(results[0]).any(axis=-1).all()


def transformers_kept(logits, warper):
    return np.isfinite(warper(None, torch.tensor(logits)[None]).numpy()[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [50, 5000])
def test_filters_equal_transformers(seed, size):
    from transformers.generation import logits_process as theirs

    logits = np.random.default_rng(seed).normal(scale=3, size=size).astype(np.float32)
    for option, warper in (
        ({"top_k": 13}, theirs.TopKLogitsWarper(13)),
        ({"top_p": 0.7}, theirs.TopPLogitsWarper(0.7)),
        ({"top_p": 0.99}, theirs.TopPLogitsWarper(0.99)),
        ({"typical_p": 0.3}, theirs.TypicalLogitsWarper(0.3)),
        ({"typical_p": 0.95}, theirs.TypicalLogitsWarper(0.95)),
        ({"min_p": 0.05}, theirs.MinPLogitsWarper(0.05)),
    ):
        kept = probabilities(logits, GenerationOptions(temperature=1.0, **option)) > 0
        assert (kept == transformers_kept(logits, warper)).all(), option


def test_ties_with_the_last_kept_token_stay():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert (probabilities(logits, GenerationOptions(temperature=1.0, top_k=2)) > 0).tolist() == [True] * 4
    assert (probabilities(logits, GenerationOptions(temperature=1.0, top_p=0.5)) > 0).tolist() == [True] * 4
    assert (probabilities(logits, GenerationOptions(temperature=1.0, top_p=0.3)) > 0).tolist() == [True] + [False] * 3


def test_no_filter_removes_all_tokens():
    """However little probability is asked for; and however flat the distribution."""
    for logits in (np.zeros(100_000, np.float32), np.linspace(-50, 50, V, dtype=np.float32)):
        for option in ({"top_p": 1e-12}, {"typical_p": 1e-12}, {"top_p": 1 - 1e-12}, {"typical_p": 1 - 1e-12}):
            p = probabilities(logits, GenerationOptions(temperature=1.0, **option))
            assert np.isfinite(p).all() and p.sum() == pytest.approx(1, abs=1e-4)


def test_top_n_sigma_ignores_tokens_that_a_constraint_removed():
    logits = np.array([3.0, 2.0, 0.0, -np.inf, -np.inf], np.float32)
    for n, kept in ((0.5, 1), (1.0, 2), (3.0, 3)):  # the deviation of the first three is 1.25
        assert (probabilities(logits, GenerationOptions(temperature=1.0, top_n_sigma=n)) > 0).sum() == kept


@pytest.mark.parametrize("temperature", [0.001, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.linspace(-1e4, 1e4, V, dtype=np.float32)
    for option in ({}, {"top_p": 0.9}, {"typical_p": 0.9}):
        p = probabilities(logits, GenerationOptions(temperature=temperature, **option))
        assert np.isfinite(p).all() and p.argmax() == V - 1


@pytest.mark.parametrize(
    ("likely", "threshold", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.1, [2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.2, [1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.4, [0, 1, 2, 3]),  # a single top choice stays
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1, 2, 3]),
        ([0.3, 0.3, 0.3, 0.1], 0.2, [0, 1, 2, 3]),  # equally likely ones all are the least likely
        ([0.05, 0.35, 0.25, 0.35], 0.01, [0]),
    ],
)
def test_xtc_leaves_the_least_likely_top_choice(likely, threshold, kept):
    options = GenerationOptions(temperature=1.0, xtc_probability=0.5, xtc_threshold=threshold)
    logits = mx.log(mx.array([likely, likely]))
    both = filter_logits(logits, options, mx.array([True, False]))
    assert np.flatnonzero(np.isfinite(np.array(both[0]))).tolist() == kept
    assert np.isfinite(np.array(both[1])).all()


def test_the_order_of_filters():
    """Each pair whose order matters: thresholds apply to what the earlier filter has left."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    kept = lambda **o: np.flatnonzero(probabilities(logits, GenerationOptions(**{"temperature": 1.0, **o}))).tolist()  # noqa: E731
    # top-k first: 0.4 and 0.3 become 0.57 and 0.43, so that 0.55 of them is the first alone.
    assert kept(top_k=2, top_p=0.55) == [0]
    # temperature first: at 4 the first two no longer hold 0.6.
    assert kept(top_p=0.6) == [0, 1] and kept(temperature=4.0, top_p=0.6) == [0, 1, 2]
    # typical before top-p: typical alone leaves the middle, of which top-p takes the likelier part.
    assert kept(typical_p=0.5) == [1, 2] and kept(typical_p=0.5, top_p=0.55) == [1]
    # XTC last, on renormalised probabilities: after top-k both of 0.57 and 0.43 are top choices from 0.42.
    options = GenerationOptions(temperature=1.0, top_k=2, xtc_probability=1.0, xtc_threshold=0.42)
    assert np.flatnonzero(probabilities(logits, options, mx.array([True]))).tolist() == [1]
