"""`mlxlm chat --prompt` with `--server`: a running server answers."""

import json
import re

import pytest

from mlxlm.cli.running_server import stream_from_server
from tests.run_command import run_command


@pytest.fixture
def ask(live, monkeypatch):
    """`ask(*arguments)` asks the server, which MLXLM_SERVER names."""
    monkeypatch.setenv("MLXLM_SERVER", live)
    monkeypatch.setattr("mlxlm.cli.chat.load_model", None)  # no model is loaded
    return lambda *arguments, **others: run_command("chat", *arguments, "-n", "9", "-t", "0", "-p", "Hello!", **others)


def test_the_server_answers(ask, live, chat, tmp_path):
    done = ask("tiny")
    expected = chat(max_tokens=9)["choices"][0]["message"]["content"]
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n")
    assert done.stderr.decode() == f"{live} answers with tiny\n"
    assert ask().stdout == done.stdout and ask("--server", f"{live}/v1/").stdout == done.stdout
    assert ask("-t", "0", "--system", "Be brief.").stdout != done.stdout
    (tmp_path / "notes.txt").write_text("Some notes.")
    with_file = ask("-f", tmp_path / "notes.txt")
    assert re.match(rf"notes.txt: \d\d tokens; the context has 4,096\n{live} answers", with_file.stderr.decode())
    message = {"role": "user", "content": "File: notes.txt\n```\nSome notes.\n```\n\nHello!"}
    assert (
        with_file.stdout.decode() == chat(max_tokens=9, messages=[message])["choices"][0]["message"]["content"] + "\n"
    )
    number = ask("--json-schema", '{"type": "integer"}')
    assert isinstance(json.loads(number.stdout), int)


def test_errors(ask, live, tmp_path):
    unknown = ask("nope")
    assert unknown.returncode == 1 and unknown.stdout == b""
    assert unknown.stderr.decode().startswith(f"error: {live}: model 'nope' not found (try: tiny")
    for address in ("http://127.0.0.1:1", "nowhere", "http://[x"):
        gone = ask("--server", address)
        assert gone.returncode == 1 and gone.stderr.startswith(f"error: {address} doesn't answer".encode())
    (tmp_path / "notes.txt").write_text("Some notes.")
    elsewhere = ask("--server", f"{live}/x", "-f", tmp_path / "notes.txt").stderr.decode()  # has no /tokenize
    assert elsewhere.startswith(
        f"notes.txt: 35 characters; {live}/x doesn't count tokens\nerror: {live}/x: there is no"
    )
    unused = ask("--session", "x", "--max-kv-size", "64")
    assert unused.returncode == 2 and b"--session and --max-kv-size would have no effect: the server" in unused.stderr


def test_a_reader_that_leaves_is_no_error_of_the_server(live):
    class Screen:
        def push(self, *_arguments):
            raise BrokenPipeError

        finish = print

    with pytest.raises(BrokenPipeError):
        stream_from_server(live, {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}, Screen())
