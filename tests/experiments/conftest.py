"""Experiments share the fixtures of training runs."""

from functools import partial

import pytest

from mlxlm.experiments import scaling_analysis
from tests.train.conftest import new_run, tokenizer_folder  # noqa: F401


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No measurement of the machine, few bootstrap samples."""
    monkeypatch.setattr("mlxlm.train.budget.measure_matmul", lambda **options: 50.0)
    for name in ("fit_joint", "fit_power"):
        monkeypatch.setattr(scaling_analysis, name, partial(getattr(scaling_analysis, name), resamples=20))
