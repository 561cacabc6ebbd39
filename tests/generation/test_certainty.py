"""Draws that count as certain: changes of the logits within the margin don't change their tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation import GenerationOptions
from mlxlm.generation.logit_filters import FILTERS
from mlxlm.generation.sampling import Sampler, sample_batch, sample_with_certainty

pytestmark = pytest.mark.skipif(not ON_CPU, reason="on a GPU there is no margin")
ROWS = 64
SHAPES = {
    "flat": lambda rng, size, margin: rng.normal(scale=2 * margin, size=size),
    "peaked": lambda rng, size, margin: rng.normal(size=size) + 8 * (np.arange(size[1]) == 0),
    "near ties": lambda rng, size, margin: np.round(rng.normal(scale=4, size=size)) / 2 + rng.uniform(0, margin, size),
    "ties": lambda rng, size, margin: np.round(rng.normal(scale=4, size=size)) / 2,
    "normal": lambda rng, size, margin: rng.normal(scale=2, size=size),
}


def draw(logits, options, margin=None):
    samplers = [Sampler(options, [0], seed) for seed in range(len(logits))]
    tokens, certain = sample_with_certainty(samplers, mx.array(logits.astype(np.float32)), margin)
    return np.array(tokens), None if certain is None else np.array(certain)


def changes(rng, logits, tokens, limit):
    """Changes of logits `[R, V]` by at most `limit`: random ones, and those that the drawn tokens can least stand."""
    drawn = np.take_along_axis(logits, tokens[:, None], axis=1)
    is_drawn = np.arange(logits.shape[1]) == tokens[:, None]
    yield np.round(logits / (2 * limit)) * 2 * limit - logits  # ties
    signs = rng.choice([-1, 1], logits.shape)
    for change in (
        rng.uniform(-1, 1, logits.shape),
        signs,
        np.where(is_drawn, -1, signs),
        np.where(is_drawn, -1, 1),
        np.where(is_drawn, 1, -1),
        np.where(is_drawn | (logits < drawn), -1, 1),
        np.where(is_drawn | (logits < drawn), 1, -1),
    ):
        yield change * limit


SETTINGS = {
    "temperature": st.sampled_from([0, 0.3, 0.7, 2.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 20]),
    "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.8, 0.95, 0.999]),
    "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 0.9]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    "logit_bias": st.sampled_from([{}, {0: 2.0}]),
}


def test_every_filter_is_in_these_tests():
    with_verdict = {one.option for one in FILTERS if one.verdict}
    assert with_verdict == {"top_k", "top_p", "min_p", "xtc_probability"}
    assert with_verdict - SETTINGS.keys() == {"xtc_probability"}  # see below


@settings(max_examples=100)
@given(
    st.builds(GenerationOptions, **SETTINGS),
    st.sampled_from(list(SHAPES)), st.sampled_from([1, 2, 6, 60]), st.sampled_from([0.002, 0.1, 0.5]),
    st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_changes_within_the_margin_change_no_certain_token(options, shape, vocab_size, margin, is_sorted, seed):
    rng = np.random.default_rng(seed)
    logits = SHAPES[shape](rng, (ROWS, vocab_size), margin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxlm.kernels.quantile._MAX_SORTED", 8192 if is_sorted else 0)
        tokens, certain = draw(logits, options, margin)
        for change in changes(rng, logits, tokens, 0.49 * margin):
            changed, _ = draw(logits + change, options)
            assert (changed == tokens)[certain].all()


@pytest.mark.parametrize("temperature", [0, 0.5, 3.0])
def test_the_margin_is_a_lead_in_logits(temperature):
    options = GenerationOptions(temperature=temperature)
    logits = np.random.default_rng(2).normal(scale=3, size=(1, 50))
    token = draw(logits, options)[0][0]
    losses = np.linspace(0, 20, 2001)
    samplers = [Sampler(options, [0], 0) for _ in losses]
    tokens = sample_batch(samplers, mx.array(logits - losses[:, None] * (np.arange(50) == token), mx.float32))
    lead = losses[np.array(tokens) == token].max()
    assert draw(logits, options, lead * 0.99)[1].all() and not draw(logits, options, lead * 1.01 + 0.01)[1].any()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_most_draws_are_certain(top_k, temperature):
    """With logits like those of a trained model: likely tokens, and a long tail."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=1.5, size=(200, 4000)) - 1.2 * np.log(np.arange(1, 4001))
    options = GenerationOptions(temperature=temperature, top_k=top_k, top_p=0.95, min_p=0.05)
    assert draw(logits, options, 0.002)[1].mean() >= 0.95


def test_filters_that_cannot_tell_and_xtc_are_never_certain():
    logits = np.random.default_rng(0).normal(scale=3, size=(200, 50))
    for name in (one.option for one in FILTERS if one.verdict is None):
        assert not draw(logits, GenerationOptions(**{name: 0.9}), 1e-9)[1].any(), name
    for others in ({}, {"top_k": 20}):
        xtc = GenerationOptions(xtc_probability=0.5, xtc_threshold=0.1, **others)
        assert 0.4 < draw(logits, xtc, 1e-9)[1].mean() < 0.6
