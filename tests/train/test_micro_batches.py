"""The gradients of a batch in parts: the same step up to rounding, with less memory; resumed to the bit."""

import numpy as np
import pytest

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train import Started, TrainingWarning, TrainSettings
from mlxlm.train.step import TrainStep
from tests.train.training_runs import contents, finish

RNG = np.random.default_rng(0)
QUICK = {"steps": 6, "eval_every": 0, "save_every": 0}


def a_step(config, micro_batches, batch_size=4, **settings):
    model = Decoder(config)
    model.init_weights(0)
    step = TrainStep(model, TrainSettings(steps=9, learning_rate=1e-2, batch_size=batch_size, **settings))
    assert step.match_environment(None, micro_batches) is None
    return step


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("cores", [1, 2])
def test_parts_are_the_same_step(tiny_config, monkeypatch, rows, cores):
    """Also of unequal size, with a loss mask, and with fewer rows than parts; on a CPU each core divides its rows."""
    monkeypatch.setattr(platform, "cpu_cores", lambda: cores)
    segments = np.repeat(np.array([[0] * 9 + [1] * 7]), rows, axis=0).astype(np.int32)
    batches = [
        Batch(RNG.integers(0, 300, (rows, 17)).astype(np.int32), segments, RNG.choice([0.0, 1, 2], (rows, 16)))
        for _ in range(2)
    ]
    whole, *others = (a_step(tiny_config, n, rows) for n in (1, 2, 3, 99))
    loss, norm = (x.item() for x in whole(batches, 1e-3))
    for step in others:
        found = step(batches, 1e-3)
        assert found[0].item() == pytest.approx(loss, rel=1e-5) and found[1].item() == pytest.approx(norm, rel=1e-4)
        for name, weight in step.weights().items():
            assert np.allclose(np.array(weight), np.array(whole.weights()[name]), atol=2e-5), name


def test_parts_take_less_memory(tiny_config, monkeypatch):
    monkeypatch.setattr(platform, "cpu_cores", lambda: 1)
    batch = Batch(RNG.integers(0, 300, (32, 65)).astype(np.int32))
    peaks = {}
    for micro_batches in (1, 8):
        step = a_step(tiny_config, micro_batches, 32)
        mx.eval(step.state)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(step([batch], 1e-3), step.state)
        peaks[micro_batches] = mx.get_peak_memory() - before
        del step
    assert peaks[8] < peaks[1] / 2


def test_resume_has_the_parts_of_before(new_run):
    """Without the argument. With another one it warns."""
    whole, broken = new_run("whole", **QUICK), new_run("broken", **QUICK)
    finish(whole, micro_batches=2)
    finish(broken, stop_at=3, micro_batches=2)
    events = finish(broken, resume=True)
    assert [e.micro_batches for e in events if isinstance(e, Started)] == [2]
    assert not [e for e in events if isinstance(e, TrainingWarning)]
    assert contents(whole.checkpoints()[-1]) == contents(broken.checkpoints()[-1])
    other = new_run("other", **QUICK)
    finish(other, stop_at=3)
    (warning,) = (e for e in finish(other, resume=True, micro_batches=4) if isinstance(e, TrainingWarning))
    assert "each batch is computed in 4 parts, before in 1" in warning.message


@pytest.mark.parametrize("invalid", [0, 9, "2", None, 2**70])
def test_invalid_numbers_of_a_checkpoint_are_not_used(tiny_config, invalid):
    step = a_step(tiny_config, None)
    step.match_environment({**step.environment, "micro_batches": invalid})
    assert step.micro_batches == 1
