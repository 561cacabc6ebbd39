"""`mlxlm launch`: a server and a client that a script plays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.cli.helpers import MLXLM, run_command
from tests.server.conftest import decoder, lm, model_folder  # noqa: F401 - fixtures

# Asks the server for its models, and prints its arguments, the models and the variables that clients read.
CLIENT = """#!{python}
import json, os, signal, sys, urllib.request
signal.signal(signal.SIGINT, lambda number, frame: os._exit(3))
names = ("OPENAI_API_BASE", "OPENCODE_CONFIG_CONTENT")
given = " ".join([*sys.argv[1:], *(os.environ.get(name, "") for name in names)])
if "--config" in sys.argv:
    given += open(sys.argv[sys.argv.index("--config") + 1]).read()
url = "http://127.0.0.1:" + given.split("http://127.0.0.1:")[1].split("/")[0].split('"')[0]
listed = json.load(urllib.request.urlopen(url + "/v1/models"))
print(json.dumps([sys.argv[1:], url, listed["data"][0]["id"]]), flush=True)
"""


@pytest.fixture
def environment(tmp_path):
    """The environment in which all clients are a script; more of it can be appended."""
    import sys

    for name in ("claude", "codex", "opencode", "aider", "cn"):
        (script := tmp_path / name).write_text(CLIENT.replace("{python}", sys.executable))
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def is_gone(url: str) -> bool:
    import urllib.request

    try:
        urllib.request.urlopen(url + "/health", timeout=5)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("client", ["claude", "opencode", "continue"])  # by arguments, variables, and a file
def test_the_client_gets_the_server_and_its_arguments(client, environment, model_folder):  # noqa: F811
    done = run_command("launch", client, model_folder, "--", "-p", "hi there", "--", env=environment)
    assert done.returncode == 0, done.stderr
    arguments, url, model = json.loads(done.stdout)
    assert arguments[-3:] == ["-p", "hi there", "--"] and model == model_folder.name and is_gone(url)
    assert f"{client} uses {model} at {url}" in done.stderr


def test_the_exit_code_is_that_of_the_client(environment, model_folder, tmp_path):  # noqa: F811
    with (tmp_path / "aider").open("a") as script:
        script.write("sys.exit(7)\n")
    assert run_command("launch", "aider", model_folder, env=environment).returncode == 7


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 3), (signal.SIGTERM, 143)])
def test_signals(number, code, environment, model_folder, tmp_path):  # noqa: F811
    """Ctrl-C is for the client, which may go on; SIGTERM ends both, and the server."""
    with (tmp_path / "aider").open("a") as script:
        script.write("signal.pause()\n")
    command = [*MLXLM, "launch", "aider", str(model_folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    url = json.loads(process.stdout.readline())[1]
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal does
    else:
        process.terminate()
    assert process.wait(30) == code
    end = time.monotonic() + 10
    while not is_gone(url) and time.monotonic() < end:
        time.sleep(0.01)
    assert is_gone(url)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["zed"], "zed reads its settings from its file only (try: mlxlm connect zed --write)"),
        (["codex"], "there is no program codex (try: npm install -g @openai/codex)"),
        (["other"], "'other' is not one of"),
    ],
)
def test_errors(arguments, problem, tmp_path):
    done = run_command("launch", *arguments, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode in (1, 2) and problem in done.stderr


def test_a_server_that_does_not_start(environment, tmp_path):
    done = run_command("launch", "aider", tmp_path / "none.gguf", env=environment)
    assert done.returncode == 1 and "the server didn't start: " in done.stderr and "none.gguf" in done.stderr
    assert done.stderr.count("error:") == 1
