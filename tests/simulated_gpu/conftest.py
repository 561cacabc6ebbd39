import pytest

from tests.metal.conftest import needs_harness

__all__ = ["metal", "needs_harness"]


@pytest.fixture
def metal(simulated_gpu):
    """A simulated Apple GPU."""
    if simulated_gpu.device.backend != "metal":
        pytest.skip("CUDA has no Metal kernels")
    return simulated_gpu
