"""Training settings: defaults, and values that can't work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.cli.main import _run
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.train import TrainSettings
from mlxlm.train.settings import LR_SCHEDULES, learning_rate
from mlxlm.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"batch_size": 0, "dropout": 1.0}, "batch_size is 0.*dropout is 1.0"),
        ({"lr_schedule": "sine"}, "schedule is 'sine'.*cosine, linear, constant, wsd"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', it must be one of " + ", ".join(OPTIMIZERS) + "$"),
        ({"dtype": "float16"}, "dtype is 'float16', it must be one of float32, bfloat16"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0, it must be a number from 0 to below 1"),
        ({"grad_checkpoint": 1}, "grad_checkpoint is 1, it must be true or false"),
        ({"optimizer": "adafactor", "beta1": 0.9}, "beta1 is 0.9, but adafactor has no beta1"),
        ({"optimizer": "adafactor", "beta2": 0.9}, "beta2 is 0.9, but adafactor has no beta2"),
        ({"optimizer": "lion", "beta2": 2}, "beta2 is 2, it must be a number from 0 to below 1"),
        ({"grad_clip": 10**400}, "grad_clip is 10+, it must be a number from 0 up"),
        ({"spike_threshold": float("nan")}, "spike_threshold is nan, it must be a number from 0 up"),
        ({"sample_prompt": 5}, "sample_prompt is 5, it must be text"),
        ({"steps": 1, "warmup_steps": 5}, "warmup_steps is 5, it must be less than steps, which is 1"),
        ({"time_limit": 0}, "time_limit is 0, it must be a number above 0"),
        ({"time_limit": "2h"}, "time_limit is '2h', it must be a number above 0"),
        ({"eval_every": None}, "eval_every is None"),  # needs a time limit
        ({"repeat_plan": "../x"}, "repeat_plan is '../x', it must be repeat_plan.jsonl or null"),
    ],
)
def test_invalid_settings(change, expected):
    with pytest.raises(ConfigError, match=expected):
        TrainSettings(**{"steps": 50, "learning_rate": 1e-3, **change})


def test_optimizer_defaults():
    for name, defaults in OPTIMIZERS.items():
        s = TrainSettings(steps=9, learning_rate=0.01, optimizer=name)
        assert (s.weight_decay, s.beta1, s.beta2) == (defaults.weight_decay, defaults.beta1, defaults.beta2)
        assert TrainSettings.from_dict(s.to_dict(), "here") == s
    given = TrainSettings(steps=9, learning_rate=0.01, optimizer="lion", beta1=0.5, weight_decay=0.0)
    assert (given.weight_decay, given.beta1, given.beta2) == (0.0, 0.5, OPTIMIZERS["lion"].beta2)


def rates(steps=100, warmup=10, min_lr_ratio=0.1, decay_fraction=0.2, lr_schedule="cosine"):
    options = {
        "lr_schedule": lr_schedule,
        "warmup": (warmup + 1) / steps,
        "min_lr_ratio": min_lr_ratio,
        "decay_fraction": decay_fraction,
    }
    return [learning_rate((i + 1) / steps, 2.0, **options) for i in range(steps)]


def test_cosine_and_linear():
    cosine, linear = rates(), rates(lr_schedule="linear")
    for i in range(10, 100):
        done = (i - 10) / 89
        assert cosine[i] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * done)) / 2)
        assert linear[i] == pytest.approx(2.0 - 1.8 * done)
    assert rates(lr_schedule="linear", min_lr_ratio=0.0)[-1] == 0.0
    assert rates(lr_schedule="constant")[10:] == [2.0] * 90


def test_warmup_stable_decay():
    found = rates(lr_schedule="wsd")
    assert found[10:80] == pytest.approx([2.0] * 70)
    assert [b - a for a, b in zip(found[79:], found[80:], strict=False)] == pytest.approx([-1.8 / 20] * 20)
    assert rates(lr_schedule="wsd", decay_fraction=0.0)[10:] == [*[2.0] * 89, pytest.approx(0.2)]
    assert rates(lr_schedule="wsd", warmup=90)[90:] == pytest.approx([2.0 - 1.8 * i / 9 for i in range(10)])


@given(
    steps=st.integers(1, 60), share=st.floats(0, 0.99), min_lr_ratio=st.floats(0, 1), decay=st.floats(0, 1),
    lr_schedule=st.sampled_from(LR_SCHEDULES),
)  # fmt: skip
def test_rates_rise_to_the_peak_and_then_fall(steps, share, min_lr_ratio, decay, lr_schedule):
    warmup = min(int(share * steps), steps - 1)
    found = rates(steps, warmup, min_lr_ratio, decay, lr_schedule)
    assert found[:warmup] == pytest.approx([2.0 * (i + 1) / (warmup + 1) for i in range(warmup)])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert all(2.0 * min_lr_ratio - 1e-9 <= rate <= 2.0 for rate in found[warmup:])
    if warmup < steps - 1 and lr_schedule in ("cosine", "linear"):
        assert found[warmup] == 2.0 and found[-1] == pytest.approx(2.0 * min_lr_ratio)


def test_min_lr_ratio_without_effect(tmp_path, capsys):
    options = ["--out", str(tmp_path / "run"), "--lr-schedule", "constant", "--min-lr-ratio", "0.1"]
    assert _run(["pretrain", str(tmp_path), *options]) == 2
    why = "--min-lr-ratio would have no effect: --lr-schedule constant stays at the peak"
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("steps, warmup", [(80, 4), (2000, 100), (40_000, 500)])
def test_default_warmup(steps, warmup):
    settings = TrainSettings(steps=steps, learning_rate=1.0)
    assert settings.learning_rate_at(warmup / steps) == pytest.approx(warmup / (warmup + 1))
    assert settings.learning_rate_at((warmup + 1) / steps) == 1.0


def test_warmup_with_a_time_limit_is_at_most_half():
    settings = TrainSettings(steps=80, learning_rate=1.0, warmup_steps=100, time_limit=10.0)
    assert settings.learning_rate_at(0.25) == settings.learning_rate_at(0.5) / 2 == 0.5
    assert settings.learning_rate_at(1.0) == pytest.approx(0.1)


def test_learning_rate_at():
    s = TrainSettings(steps=50, learning_rate=0.5, lr_schedule="linear", warmup_steps=5, min_lr_ratio=0.0)
    assert [s.learning_rate_at((i + 1) / 50) for i in (0, 5, 49)] == pytest.approx([0.5 / 6, 0.5, 0.0])
