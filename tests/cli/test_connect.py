"""`mlxlm connect`: the configuration of clients, in a home folder of the test."""

from __future__ import annotations

import json
import socket
import threading
import tomllib

import pytest
import yaml

from mlxlm.cli.clients import CLIENTS
from mlxlm.cli.running_server import Endpoint
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings
from tests.run_command import run_command
from tests.server.conftest import decoder, lm, model_folder, running  # noqa: F401 - fixtures

JSON = ["opencode", "zed"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "MLXLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def live(model_folder):  # noqa: F811
    """The address of a server that hasn't loaded its model."""
    with running(make_app(Models({"tiny": str(model_folder)}, ModelSettings()))) as address:
        yield address


def parse(path):
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def values(tree):
    if isinstance(tree, dict | list):
        return [value for part in (tree.values() if isinstance(tree, dict) else tree) for value in values(part)]
    return [tree]


@pytest.mark.parametrize("client", CLIENTS)
def test_write_makes_the_file_that_is_printed(client, live, home):
    printed = run_command("connect", client, "--server", live + "/v1/")
    assert printed.returncode == 0 and not list(home.iterdir())
    done = run_command("connect", client, "--server", live, "--write")
    file = CLIENTS[client].file
    assert done.returncode == 0 and file.read_bytes() == printed.stdout and file.is_relative_to(home)
    assert (b"Start it with: MLXLM_API_KEY=none zed" in done.stderr) == (client == "zed")
    assert file.stat().st_mode & 0o077 == 0
    found = values(parse(file))
    assert "tiny" in found or "openai/tiny" in found
    assert live in found if client == "claude" else live + "/v1" in found
    assert 4096 in found or "4096" in found or client == "aider"
    again = run_command("connect", client, "--server", live, "--write")
    assert b"has it already" in again.stderr and len(list(file.parent.iterdir())) == 1


@pytest.mark.parametrize("client", CLIENTS)
def test_a_file_that_exists_is_copied(client, live):
    file = CLIENTS[client].file
    file.parent.mkdir(parents=True, exist_ok=True)
    old = '{"theme": "dark", "provider": {"mine": {}, "mlxlm": {"models": {"gone": {}}}}}'
    for number, copy in enumerate((file.with_name(file.name + ".bak"), file.with_name(file.name + "-2.bak"))):
        file.write_text(old + " " * number)
        assert run_command("connect", client, "--server", live, "--write").returncode == 0
        assert copy.read_text() == old + " " * number
    if client in JSON:
        assert parse(file)["theme"] == "dark" and "mine" in parse(file)["provider"]
    if client == "opencode":
        assert list(parse(file)["provider"]["mlxlm"]["models"]) == ["tiny"]


@pytest.mark.parametrize("client", JSON)
@pytest.mark.parametrize(
    "old",
    [b'{\n // a comment\n "a": 1}', b"[]", b'{"provider": 1, "language_models": 1}', b'{"a": 1,}', b'{"a": "\xff"}'],
)
def test_a_file_that_cannot_be_merged_is_left_alone(client, old, live):
    file = CLIENTS[client].file
    file.parent.mkdir(parents=True)
    file.write_bytes(old)
    done = run_command("connect", client, "--server", live, "--write")
    assert done.returncode == 1 and b"paste" in done.stderr and done.stderr.count(b"\n") == 1
    assert file.read_bytes() == old and len(list(file.parent.iterdir())) == 1


def test_a_link_stays_a_link(live, home):
    (home / "dotfiles").mkdir()
    (target := home / "dotfiles/opencode.json").write_text("{}")
    file = CLIENTS["opencode"].file
    file.parent.mkdir(parents=True)
    file.symlink_to(target)
    assert run_command("connect", "opencode", "--server", live, "--write").returncode == 0
    assert file.is_symlink() and "mlxlm" in parse(target)["provider"]
    file.unlink()
    file.symlink_to(file.name)
    done = run_command("connect", "opencode", "--server", live, "--write")
    assert done.returncode == 1 and b"symbolic links" in done.stderr and file.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--server", "http://127.0.0.1:9"], b"http://127.0.0.1:9 doesn't answer: "),
        (["--server", "nonsense"], b"nonsense doesn't answer: "),
        (["--server", "{live}", "--model", "big"], b"has no model big (try: tiny)"),
        (["--server", "{live}/page"], b"/page: "),
    ],
)
def test_errors(arguments, problem, live):
    done = run_command("connect", "codex", *(argument.replace("{live}", live) for argument in arguments))
    assert done.returncode == 1 and problem in done.stderr and done.stderr.count(b"\n") == 1


def test_a_server_of_another_protocol():
    def greet():
        with listener.accept()[0] as connection:
            connection.sendall(b"SSH-2.0\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet)
        thread.start()
        done = run_command("connect", "codex", "--server", f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert done.returncode == 1 and b"doesn't answer: SSH-2.0" in done.stderr


def test_no_proxy_and_no_scheme_are_needed(live, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    done = run_command("connect", "codex", "--server", live.removeprefix("http://"))
    assert done.returncode == 0 and f'"{live}/v1"'.encode() in done.stdout


def test_the_key_of_the_environment(monkeypatch, home):
    endpoint = Endpoint("http://127.0.0.1:8080", 'a "model"', None, "secret")
    texts = {name: client.settings(endpoint) for name, client in CLIENTS.items()}
    assert [name for name, text in texts.items() if "secret" not in text] == [
        "codex",
        "zed",
    ]  # which read it themselves
    assert tomllib.loads(texts["codex"])["model_providers"]["mlxlm"]["env_key"] == "MLXLM_API_KEY"
    assert yaml.safe_load(texts["continue"])["models"][0]["model"] == 'a "model"'
