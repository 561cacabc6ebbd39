"""pytest fixtures. Enable them with `pytest_plugins = ["harness.plugin"]` in the top-level conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .api import Log, install, use
from .api import metal_kernel as harness_metal_kernel
from .build import available

install()


@pytest.fixture
def metal_harness() -> Iterator[Log]:
    """Run Metal kernels in the harness during a test. Skips the test where the harness can't run.

    Returns:
        The log of the launches.
    """
    if reason := available():
        pytest.skip(reason)
    with use() as log:
        yield log


@pytest.fixture
def metal_kernel(metal_harness: Log) -> Callable[..., Callable]:
    """A function with the arguments of `mx.fast.metal_kernel`, whose kernels run in the harness."""
    return harness_metal_kernel
