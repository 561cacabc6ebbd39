"""Loss spikes, and noise that is none."""

import json
import math

import numpy as np
import pytest

from mlxlm.train.loop import SpikeDetector

STEPS = np.arange(4000)


def bimodal(rng, fraction):
    """Answers of which most are known, as in fine-tuning with a batch size of 1."""
    return np.where(rng.random(len(STEPS)) < fraction, 3 + 0.5 * rng.standard_normal(len(STEPS)), 0.01)


HEALTHY = {
    "stationary": lambda rng: 3 + 0.5 * rng.standard_normal(len(STEPS)),
    "decaying": lambda rng: 3 + 3 * np.exp(-STEPS / 300) + 0.5 * rng.standard_normal(len(STEPS)),
    "noise above the threshold": lambda rng: 6 + 1.5 * rng.standard_normal(len(STEPS)),
    "heavy-tailed": lambda rng: np.exp(rng.standard_normal(len(STEPS))),
    "a sixth is not learned": lambda rng: bimodal(rng, 1 / 6),
    "a third is not learned": lambda rng: bimodal(rng, 1 / 3),
}


def stopped_at(losses, detector=None):
    detector = detector or SpikeDetector(1.0, math.log(1024))
    return next((step for step, loss in enumerate(losses, 1) if detector.problem(max(loss, 1e-6), 1.0)), None)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_not_stopped(name):
    """Of 2,000 runs of each kind, none is; here are three."""
    rng = np.random.default_rng(0)
    assert [stopped_at(HEALTHY[name](rng).tolist()) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("rise", "earliest", "latest"),
    [(lambda step: 3.0, 14, 25), (lambda step: 0.1 * step, 10, 50), (lambda step: 0.01 * step, 80, 250)],
    ids=["jump", "fast", "slow"],
)
def test_diverging_runs_are_stopped_soon(rise, earliest, latest):
    rng = np.random.default_rng(0)
    for noise in (0.05, 0.5):
        losses = 3 + 3 * np.exp(-STEPS / 200) + noise * rng.standard_normal(len(STEPS))
        losses[1000:] += [rise(step) for step in range(3000)]
        assert earliest <= stopped_at(losses.tolist()) - 1000 <= latest


def test_a_run_that_diverges_at_once_is_stopped():
    """It has no lower loss to compare with. Above a uniform distribution's only the first losses of some models are."""
    assert stopped_at([7.0, 7.1] + [50_000.0] * 20) == 17
    assert stopped_at([12.0] * 50 + [6.0] * 50) is None
    assert stopped_at([7.0] + [9.0] * 14 + [6.0] * 50) is None


def test_a_resumed_run_is_stopped_at_the_same_step():
    rng = np.random.default_rng(0)
    losses = (3 + 0.5 * rng.standard_normal(300) + np.where(np.arange(300) < 200, 0, 3)).tolist()
    whole = stopped_at(losses)
    first = SpikeDetector(1.0, math.log(1024))
    assert stopped_at(losses[: whole - 1], first) is None
    assert not first.healthy  # a checkpoint saved now is not a good one
    state = json.loads(json.dumps(first.state))
    assert stopped_at(losses[whole - 1 :], SpikeDetector(1.0, math.log(1024), state)) == 1


def test_losses_that_are_not_compared():
    """Of steps without a token to learn; and all, with a threshold of 0, except those that are not finite."""
    detector = SpikeDetector(1.0, math.log(1024))
    assert stopped_at([3.0] * 100, detector) is None
    state = detector.state
    assert all(detector.problem(0.0, 0.0) is None for _ in range(100)) and detector.state == state
    assert detector.healthy and stopped_at([4.5] * 20, detector) is not None
    off = SpikeDetector(0.0, math.log(1024))
    assert stopped_at([3.0] * 100 + [9e9] * 100, off) is None and off.healthy
    assert off.problem(math.nan, 1.0) == "the loss is nan and the gradient's norm 1.0"
