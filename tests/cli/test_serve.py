"""`mlxlm serve`: what it refuses. tests/server/test_run.py starts it."""

from __future__ import annotations

import socket

import pytest

from mlxlm.cli.serve import _named
from tests.run_command import run_command


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("MLXLM_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--models-dir", "none"], "--models-dir none is not a folder"),
        (["m", "--models-dir", "."], "either MODEL or --models-dir"),
        (["--draft-model", "c"], "needs a single MODEL"),
        (["m", "--keep-alive", "soon"], "keep_alive is 'soon'"),
        (["m", "--alias", "gpt"], "NAME=MODEL"),
        (["m", "--host", "0.0.0.0"], "--no-auth"),
        (["m", "--host", "no-such-host.invalid"], "not an address of this machine"),
        (["m", "--no-auth", "--api-key", "k"], "either --api-key"),
        (["m", "--api-key", "kéy"], "characters that a header can't have"),
        (["m", "--api-key", ""], "characters that a header can't have"),
        (["a/m", "a/m"], "two models a/m"),
        (["x=a/m", "x=b/m"], "two models x"),
        (["a", "b", "--draft-model", "c"], "needs a single MODEL"),
        (["m", "--max-memory", "much"], "is not a size"),
        (["m", "--max-memory", "-1GB"], "is not a size"),
        (["m", "--port", "70000"], "port is 70000"),
        (["m", "--temperature", "-3"], "temperature"),
    ],
)
def test_usage_errors(arguments, problem):
    done = run_command("serve", *arguments)
    assert done.returncode == 2 and problem in done.stderr.decode()


def test_a_model_that_is_not_there(tmp_path):
    done = run_command("serve", tmp_path / "none.gguf", "--port", 0)
    assert done.returncode == 1 and done.stderr.startswith(b"error: ") and b"none.gguf" in done.stderr


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_command("serve", tmp_path, "--port", taken.getsockname()[1])
    assert done.returncode == 1 and b"cannot listen on 127.0.0.1 port" in done.stderr


def test_names(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "stories=1"
    folder.mkdir(parents=True)
    named = _named([str(folder), "org/name", f"small={folder}", "large=org/name@v2"])
    assert named == {"stories=1": str(folder), "org/name": "org/name", "small": str(folder), "large": "org/name@v2"}
    monkeypatch.chdir(tmp_path)
    assert _named(["runs"]) == {"runs": str(tmp_path / "runs")}  # which may be loaded from another folder
