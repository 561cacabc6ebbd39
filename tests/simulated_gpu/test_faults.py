"""What a user sees when a GPU fails: another path and a warning, or an error in one line; nothing is lost."""

import re

import numpy as np
import pytest
from starlette.testclient import TestClient

from mlxlm.backend import device
from mlxlm.backend.mlx import mx
from mlxlm.chat.session import Chat
from mlxlm.generation import GenerationOptions, device_thread, load
from mlxlm.generation.device_memory import wired_limit
from mlxlm.generation.engine import Engine
from mlxlm.generation.request import Request
from mlxlm.kernels import dispatch, measurements, rms_norm
from mlxlm.kernels.dispatch import Case
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings
from mlxlm.utils.errors import DeviceError
from tests.run_command import run_command
from tests.simulated_gpu.faults import IMPACTING_INTERACTIVITY, INSUFFICIENT_MEMORY

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


def request(*ids, **options):
    return Request(ids, GenerationOptions(**{"max_tokens": 6, "temperature": 0.0, **options}))


@pytest.fixture
def engine(folder):
    """Its kernels, with a cached prompt too, are checked already."""
    with Engine(load(folder / "my-model")) as engine:
        for _ in range(2):
            engine.submit(request(5, 6, 7)).result()
        yield engine


def test_engine_continues_after_a_failed_command_buffer(simulated_gpu, engine):
    expected = engine.submit(request(5, 6, 7)).result().tokens
    for step in (0, 2):
        simulated_gpu.faults.failing_evaluations = {step}
        with pytest.raises(DeviceError, match=f"out of memory: {re.escape(INSUFFICIENT_MEMORY.rstrip('.'))}"):
            engine.submit(request(5, 6, 7)).result()
        simulated_gpu.faults.clear()
        for _ in range(2):
            assert engine.submit(request(5, 6, 7)).result().tokens == expected


def test_nothing_of_a_failed_command_buffer_is_used(simulated_gpu, folder, engine):
    """Neither in this engine nor in another: texts fail, and keys and values of earlier texts are forgotten."""
    with Engine(load(folder / "my-model")) as other:
        assert other.submit(request(5, 6, 7)).result() and other.stats.prefix_cache_bytes > 0
        texts = [one.submit(request(*ids, max_tokens=900)) for one in (other, engine) for ids in ((8, 9), (5, 6, 7))]
        for text in texts:
            next(text)
        simulated_gpu.faults.failing_evaluations = {0}
        for text in texts:
            with pytest.raises(DeviceError):
                text.result()
        for one in (engine, other):
            before = one.stats.cached_tokens
            assert one.submit(request(5, 6, 7)).result() and one.stats.cached_tokens == before


def test_server_continues_after_a_failed_command_buffer(simulated_gpu, folder):
    settings = ModelSettings()
    models = Models({"my-model": str(folder / "my-model")}, settings)
    question = {"messages": [{"role": "user", "content": "Where did the cat sit?"}], "max_tokens": 8, "temperature": 0}
    with TestClient(make_app(models)) as client:

        def ask(**fields):
            response = client.post("/v1/chat/completions", json={**question, **fields})
            for _ in range(4):  # the engine's last steps come after the answer, and their evaluations count
                device_thread.run(lambda: None)
            return response

        expected = [ask().raise_for_status().json()["choices"] for _ in range(2)][1]
        for error in (INSUFFICIENT_MEMORY, IMPACTING_INTERACTIVITY):
            simulated_gpu.faults.failing_evaluations = {2}
            simulated_gpu.faults.command_buffer_error = error
            failed = ask()
            assert failed.status_code == 503 and failed.json()["error"]["message"].endswith(error.rstrip("."))
            assert ask().raise_for_status().json()["choices"] == expected
        simulated_gpu.faults.failing_evaluations = {6}  # after the first token
        events = ask(stream=True).text.split("\n\n")
        assert "choices" in events[0] and "Impacting Interactivity" in events[-2]
        assert ask().raise_for_status().json()["choices"] == expected


def test_conversation_survives_a_failed_command_buffer(simulated_gpu, folder):
    chat = Chat(load(folder / "my-model"), temperature=0, max_tokens=6)
    for question in ("Hello", "Again"):
        list(chat.ask(question))
    messages = list(chat.messages)
    simulated_gpu.faults.failing_evaluations = set(range(100))  # some check kernels, which then aren't used
    with pytest.raises(DeviceError):
        list(chat.ask("And now?"))
    assert chat.messages == messages
    simulated_gpu.faults.clear()
    list(chat.ask("And now?"))
    assert len(chat.messages) == len(messages) + 2


def test_small_working_set_is_what_training_may_use(simulated_gpu, tmp_path, folder):
    if simulated_gpu.device.name != "Apple M1":
        pytest.skip("for the device with the smallest memory")
    assert device.device_memory() == simulated_gpu.device.working_set
    refused = run_command("pretrain", folder / "stories.txt", "--out", tmp_path / "run", "--preset", "1b")
    assert refused.returncode == 1 and "are available (try: " in refused.stderr.decode()
    assert not (tmp_path / "run").exists()
