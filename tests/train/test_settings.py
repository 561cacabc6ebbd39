"""Training settings: defaults, and values that can't work."""

import pytest

from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.train import TrainSettings
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
        ({"ema_decay": 1.0}, "ema_decay is 1.0, it must be at least 0 and below 1"),
        ({"grad_checkpoint": 1}, "grad_checkpoint is 1, it must be true or false"),
        ({"optimizer": "adafactor", "beta1": 0.9}, "beta1 is 0.9, but adafactor has no beta1"),
        ({"optimizer": "adafactor", "beta2": 0.9}, "beta2 is 0.9, but adafactor has no beta2"),
        ({"optimizer": "lion", "beta2": 2}, "beta2 is 2, it must be at least 0 and below 1"),
        ({"grad_clip": 10**400}, "grad_clip is 10+, it must be a number from 0 up"),
        ({"spike_threshold": float("nan")}, "spike_threshold is nan, it must be a number from 0 up"),
        ({"sample_prompt": 5}, "sample_prompt is 5, it must be text"),
        ({"steps": 1, "warmup_steps": 5}, "warmup_steps is 5, it must be less than steps, which is 1"),
        ({"time_limit": 0}, "time_limit is 0, it must be a positive number"),
        ({"time_limit": "2h"}, "time_limit is '2h', it must be a positive number"),
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
