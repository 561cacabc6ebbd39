import pytest

from tests.metal.conftest import needs_harness
from tests.stand_ins import make_stand_ins

__all__ = ["folder", "metal", "needs_harness"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny_config, tiny_tokenizer, make_text):
    """A folder with a tiny model and texts."""
    return make_stand_ins(tmp_path_factory.mktemp("stand-ins"), tiny_config, tiny_tokenizer, make_text)


@pytest.fixture
def metal(simulated_gpu):
    """A simulated Apple GPU."""
    if simulated_gpu.device.backend != "metal":
        pytest.skip("CUDA has no Metal kernels")
    return simulated_gpu
