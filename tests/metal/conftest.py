"""Fixtures that run a kernel test twice: in the harness, and on a GPU if there is one."""

from __future__ import annotations

import os

import pytest

from mlxlm.backend.mlx import mx
from tests.metal import harness
from tests.metal.harness.api import install as install_harness
from tests.simulated_gpu import install

install_harness()


def need_harness() -> None:
    """Skip the test if the harness can't run here, or fail it if MLXLM_REQUIRE_HARNESS=1."""
    if reason := harness.available():
        if os.environ.get("MLXLM_REQUIRE_HARNESS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(params=["harness", "gpu"])
def metal(request):
    """Make Metal kernels run; returns the log of the harness, or None on a GPU."""
    if request.param == "harness":
        need_harness()
        with harness.use() as log:
            yield log
    elif not mx.metal.is_available() or install.current:
        pytest.skip("no Metal")
    else:
        yield None


@pytest.fixture
def needs_harness():
    need_harness()
