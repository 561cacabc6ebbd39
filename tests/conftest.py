"""Shared fixtures: a tiny model and tokenizer, texts, real data."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mlxlm.config import ModelConfig
from tests.paths import SHARED
from tests.simulated_gpu import DEVICES, install

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # M5 and NVIDIA shorten float32 factors, by default: errors of 1e-3
# MKL's threads sleep between products instead of spinning for 200 ms: half of the CPU time of small products.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Hundreds of processes import mlxlm: compiling it takes each of them longer than the imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Now, since the conftest.py files of subfolders import MLX before pytest calls any hook of this file.
install.simulate_by_arguments()

# A forked process lacks MLX's threads, for which the collection of an array could wait forever.
os.register_at_fork(before=gc.disable, after_in_parent=gc.enable)

# The same examples each time, without deadlines. `pytest --hypothesis-profile explore` takes others.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **_UNTIMED)
settings.register_profile("same", derandomize=True, **_UNTIMED)
settings.load_profile("same")


def pytest_addoption(parser):
    group = parser.getgroup("simulated GPU (tests/simulated_gpu)")
    group.addoption("--device", choices=["cpu", *DEVICES], default="cpu", help="run as if this were MLX's device")
    group.addoption("--simulated-kernels", choices=["mlx", "harness"], default="mlx", help="how kernels are launched")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the environment
        precompile_header(config)
    if config.getoption("device") != "cpu" and install.current is None:
        raise pytest.UsageError("--device must be given on the command line")


def pytest_collection_finish():
    gc.freeze()  # 700,000 objects of imports and tests, which a full collection would go through in 0.4 s


def precompile_header(config):
    """Put a g++ first in PATH that has the header of MLX's CPU kernels precompiled: 0.2 s for each kernel, not 1.2 s.

    A run of all tests compiles about 900 of them.
    """
    compiler = shutil.which("g++")
    include = Path(find_spec("mlx.core").origin).parent / "include"
    header = Path("mlx/backend/cpu/compiled_preamble.h")
    if compiler is None or not (include / header).exists():
        return
    folder = Path(tempfile.mkdtemp(prefix="mlxlm-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    output = folder / f"{header}.gch"
    output.parent.mkdir(parents=True)
    flags = ["-std=c++17", "-O3", "-fPIC", "-I", include]  # MLX's, or the compiler wouldn't use it
    command = [compiler, *flags, "-w", "-x", "c++-header", include / header, "-o", output]
    if subprocess.run(command, capture_output=True).returncode == 0:
        wrapper = folder / "g++"
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} -I {folder} "$@"\n')
        wrapper.chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "birds", "in", "old", "garden", "while", "rain"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Use an empty cache folder, so that measurements of this machine don't affect the tests.

    It is shared by the workers of pytest-xdist, so that one of them compiles quantized_matmul.cpp.
    """
    from mlxlm.backend.cpu_extension import load_extension

    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        patch.setenv("MPLCONFIGDIR", str(base / "matplotlib"))  # its list of fonts takes a second
        with open(base / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            load_extension()
        yield


@pytest.fixture(scope="session", autouse=True)
def no_plots():
    """Runs don't draw loss.png, which takes longer than their training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxlm.train.run.plot_losses", lambda history, path: None)
        yield


@pytest.fixture
def simulated_gpu():
    """The simulated GPU, whose faults end with the test. Skips the test without one."""
    if install.current is None:
        pytest.skip("no simulated GPU: pytest --device simulated-m2")
    yield install.current
    install.current.faults.clear()


@pytest.fixture(scope="session")
def make_text():
    """`make_text(words)`: sentences of common words, always the same."""

    def make(words: int) -> str:
        rng = random.Random(0)
        lines = []
        while words > 0:
            n = rng.randint(4, 12)
            lines.append(" ".join(rng.choice(WORDS) for _ in range(n)).capitalize() + ".")
            words -= n
        return "\n".join(lines) + "\n"

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts, if there is one next to this checkout."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("no folder of real texts next to this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """A Llama with two layers."""
    return ModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=300,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def tiny_tokenizer(make_text):
    """A byte-level tokenizer of 300 tokens."""
    from mlxlm.tokenizer import train

    return train([make_text(3000)], 300)


@pytest.fixture
def text_file(tmp_path: Path, make_text) -> Path:
    """A file with 4000 words."""
    path = tmp_path / "text.txt"
    path.write_text(make_text(4000), encoding="utf-8")
    return path


@pytest.fixture
def new_machine(monkeypatch, tmp_path):
    """A machine with Metal on which no kernel was chosen, tested or measured; nothing can be launched."""
    from mlxlm.kernels import dispatch, measurements

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_environment", "auto")
    monkeypatch.setattr(dispatch, "metal_available", lambda: True)
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.setattr(dispatch, "_failures", {})
    measurements._read.cache_clear()
    yield
    measurements._read.cache_clear()
