"""The fixture under which every kernel test runs twice: in the harness, and on a real GPU where there is one."""

from __future__ import annotations

import os

import pytest

from mlxlm.backend.mlx import mx
from tests.metal import harness


def need_harness() -> None:
    """Skips the test where the harness can't run; fails it where MLXLM_REQUIRE_HARNESS=1 promises that it can."""
    if reason := harness.available():
        if os.environ.get("MLXLM_REQUIRE_HARNESS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(params=["harness", "gpu"])
def metal(request):
    """Makes Metal kernels run for the duration of a test; in the harness, gives its log, else None."""
    if request.param == "harness":
        need_harness()
        with harness.use() as log:
            yield log
    elif not mx.metal.is_available():
        pytest.skip("no Metal")
    else:
        yield None


@pytest.fixture
def needs_harness():
    need_harness()
