"""What a user sees when a GPU fails: another path and a warning, or an error in one line; nothing is lost."""

import re

import numpy as np
import pytest

from mlxlm.backend import device
from mlxlm.backend.mlx import mx
from mlxlm.generation import load
from mlxlm.generation.device_memory import wired_limit
from mlxlm.kernels import dispatch, measurements, rms_norm
from mlxlm.kernels.dispatch import Case
from tests.run_command import run_command
from tests.simulated_gpu.faults import COMMAND_BUFFER_FAILED

FAULTS = {
    "not_compiled": "failed on this machine .*Unable to build metal library",
    "too_many_registers": "failed on this machine .*Thread group size",
    "wrong": "wrong on this machine",
}
TRANSFORMS = {"plain": lambda f: f, "compile": mx.compile, "checkpoint": lambda f: mx.compile(mx.checkpoint(f))}


@pytest.mark.usefixtures("new_machine")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_faulty_kernel_is_replaced(metal, monkeypatch, fault, transform):
    """The first use may be in a trace: an error of the kernel itself would only come with the training step."""
    case = Case("rms_norm", "float32", ("N", "rows"), (96, 8))
    monkeypatch.setattr(measurements, "fastest_path", lambda name: "metal" if name == str(case) else None)
    getattr(metal.faults, fault).add("rms_norm_grad")
    x, weight = mx.random.normal((4, 96)), mx.ones(96)

    def loss(x):
        return rms_norm(x, weight, 1e-5).square().sum()

    with pytest.warns(UserWarning, match=FAULTS[fault]):
        found = mx.grad(TRANSFORMS[transform](loss))(x)
    expected = mx.grad(lambda x: mx.fast.rms_norm(x, weight, 1e-5).square().sum())(x)
    assert np.allclose(np.array(found), np.array(expected), atol=1e-5)
    assert dispatch._choices[case, "auto"].path == "mlx" and not measurements.cache_path().exists()


def test_refused_wired_limit_is_a_warning(metal):
    metal.faults.wired_limit_refused = True
    with pytest.warns(UserWarning, match="keep the model in memory"), wired_limit():
        pass
    metal.faults.clear()
    with wired_limit(), wired_limit():
        assert metal.wired_limit == metal.device.working_set
    assert metal.wired_limit == 0


def generate(folder):
    return run_command("generate", folder / "my-model", "-p", "The cat sat on", "-n", "8", "--temperature", "0")


def test_failed_command_buffer_ends_a_generation_with_one_line(simulated_gpu, folder):
    assert generate(folder).returncode == 0  # checks the kernels
    simulated_gpu.faults.failing_evaluations = {6}
    failed = generate(folder)
    assert failed.returncode == 1
    (line,) = failed.stderr.decode().splitlines()[-1:]
    assert line.startswith("error: out of memory: [METAL] Command buffer execution failed") and "(try: " in line
    assert generate(folder).returncode == 0


def test_engine_continues_after_a_failed_command_buffer(simulated_gpu, folder):
    from mlxlm.generation import GenerationOptions
    from mlxlm.generation.engine import Engine
    from mlxlm.generation.request import Request

    with Engine(load(folder / "my-model")) as engine:
        request = Request([5, 6, 7], GenerationOptions(max_tokens=6, temperature=0.0))
        expected = engine.submit(request).result().tokens
        assert engine.submit(request).result().tokens == expected  # its kernels, with a cached prompt, are checked too
        for step in (0, 2):
            simulated_gpu.faults.failing_evaluations = {step}
            with pytest.raises(RuntimeError, match=re.escape(COMMAND_BUFFER_FAILED)):
                engine.submit(request).result()
            simulated_gpu.faults.clear()
            assert engine.submit(request).result().tokens == expected


def test_small_working_set_is_what_training_may_use(simulated_gpu, tmp_path, folder):
    if simulated_gpu.device.name != "Apple M1":
        pytest.skip("for the device with the smallest memory")
    assert device.device_memory() == simulated_gpu.device.working_set
    refused = run_command("pretrain", folder / "stories.txt", "--out", tmp_path / "run", "--preset", "1b")
    assert refused.returncode == 1 and "are available (try: " in refused.stderr.decode()
    assert not (tmp_path / "run").exists()
