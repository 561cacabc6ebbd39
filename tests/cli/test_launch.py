"""`mlxlm launch`: a server, and a client that a script plays."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from contextlib import contextmanager

import pytest

from mlxlm.cli.clients import CLIENTS
from mlxlm.cli.launch import _server
from mlxlm.utils.errors import PlatformError
from tests.cli.helpers import MLXLM
from tests.run_command import run_command
from tests.server.conftest import decoder, live, lm, model_folder, models, served  # noqa: F401 - fixtures

# Asks the server for its models, and prints its arguments, the address and the model.
CLIENT = f"""#!{sys.executable}
import json, os, signal, sys, time, urllib.request
signal.signal(signal.SIGINT, lambda number, frame: os._exit(3))
given = " ".join([*sys.argv[1:], os.environ.get("OPENCODE_CONFIG_CONTENT", "")])
for option in ("--config", "--settings"):
    if option in sys.argv:
        given += open(sys.argv[sys.argv.index(option) + 1]).read()
url = "http://127.0.0.1:" + given.split("http://127.0.0.1:")[1].split("/")[0].split('"')[0]
listed = json.load(urllib.request.urlopen(url + "/v1/models"))
print(json.dumps([sys.argv[1:], url, listed["data"][0]["id"]]), flush=True)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script that all clients are; code can be appended."""
    (path := tmp_path / "client").write_text(CLIENT)
    path.chmod(0o755)
    for client in CLIENTS.values():
        (tmp_path / client.program).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return path


@pytest.fixture
def one_server(live, monkeypatch):  # noqa: F811
    """Let the command use a server of this process instead of one of its own."""

    @contextmanager
    def server(models):  # noqa: F811
        yield live

    monkeypatch.setattr("mlxlm.cli.launch._server", server)
    return live


def is_gone(url: str) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url + "/health", timeout=5)
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "zed"])
def test_the_client_gets_the_server_and_its_arguments(client, script, one_server, capfd):
    done = run_command("launch", client, "--", "-p", "hi there", "--")
    out = capfd.readouterr().out
    assert done.returncode == 0, done.stderr
    arguments, url, model = json.loads(out)
    assert arguments[-3:] == ["-p", "hi there", "--"] and (url, model) == (one_server, "tiny")
    assert done.stderr.decode() == f"{client} uses tiny at {one_server}\n"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_exit_code_is_that_of_the_client(end, code, script, one_server):
    script.write_text(f"{CLIENT}{end}\n")
    assert run_command("launch", "aider").returncode == code


@pytest.mark.parametrize(
    ("number", "end", "code"),
    [
        (signal.SIGINT, "signal.pause()", 3),
        (signal.SIGTERM, "signal.pause()", 143),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)", 143),
    ],
)
def test_signals(number, end, code, script, live):  # noqa: F811
    """Ctrl-C is for the client, which may go on; SIGTERM ends both, also a client that ignores it."""
    script.write_text(f"{CLIENT}{end}\n")
    program = (
        "import contextlib, sys; from mlxlm.cli import launch, main; launch._STOP_SECONDS = 0.1\n"
        "launch._server = lambda models: contextlib.nullcontext(sys.argv[1]); main.main(['launch', 'aider'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, live], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    process.stdout.readline()
    if "IGN" in end:
        process.stdout.readline()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal does
    else:
        process.terminate()
    assert process.wait(30) == code and process.stdout.read() == ""


def test_the_server_ends_if_the_command_is_killed(script, model_folder):  # noqa: F811
    script.write_text(f"{CLIENT}signal.pause()\n")
    command = [*MLXLM, "launch", "aider", str(model_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        _, url, model = json.loads(process.stdout.readline())
        assert model == model_folder.name
        process.kill()
        assert is_gone(url)
        os.killpg(process.pid, signal.SIGTERM)  # the client


def test_a_server_that_does_not_start(tmp_path):
    (tmp_path / "none.gguf").touch()
    with (
        pytest.raises(PlatformError, match=r"the server didn't start: .*none\.gguf"),
        _server([tmp_path / "none.gguf"]),
    ):
        pass


def test_a_server_that_ends_before_the_client(model_folder, monkeypatch, capsys):  # noqa: F811
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr("subprocess.Popen", Popen)
    with _server([model_folder]):
        started[0].kill()
        started[0].wait()
    assert "the server ended before the client, with exit code -9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["zed"], "error: zed reads its settings from its file only (try: mlxlm connect zed --write)"),
        (["codex"], "error: codex is not installed: there is no program codex (try: npm install -g @openai/codex)"),
        (["claude", "none.gguf"], "error: claude is not installed"),
        (["other"], "'other' is not one of"),
    ],
)
def test_errors(arguments, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_command("launch", *arguments)
    assert done.returncode in (1, 2) and problem in done.stderr.decode()


def test_a_model_that_does_not_exist(script):
    done = run_command("launch", "aider", "smal-world")
    assert done.returncode == 1 and done.stderr == b"error: there is no model 'smal-world' (try: small-world)\n"


def test_the_terminal_of_a_client_that_was_killed_is_restored(script, one_server):
    script.write_text(f"{CLIENT}import tty; tty.setraw(0); os.kill(os.getpid(), signal.SIGKILL)\n")
    (main, terminal), stdin = pty.openpty(), os.dup(0)
    before = termios.tcgetattr(terminal)
    os.dup2(terminal, 0)
    try:
        assert run_command("launch", "aider").returncode == 137 and termios.tcgetattr(terminal) == before
    finally:
        os.dup2(stdin, 0)
        for descriptor in (main, terminal, stdin):
            os.close(descriptor)
