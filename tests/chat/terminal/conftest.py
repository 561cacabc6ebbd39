"""A chat in a terminal or a pipe."""

import os
import signal

import pexpect
import pytest

from tests.chat.terminal.chat_process import MLXLM, PROMPT
from tests.run_command import run_command


@pytest.fixture
def environment(tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "%s, edited" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "VISUAL", "COLUMNS")}
    return {
        **inherited, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1",
        "EDITOR": str(editor),
    }  # fmt: skip


@pytest.fixture
def terminal(model_folder, environment):
    """`terminal(*arguments)` starts a chat; it is ended with the test."""
    running = []

    def start(*arguments, **changes):
        command = [*MLXLM, "chat", *([] if "--continue" in arguments else [str(model_folder), "-t", "0"]), *arguments]
        child = pexpect.spawn(
            command[0], command[1:], env={**environment, **changes}, encoding="utf-8", timeout=15, dimensions=(40, 160)
        )
        running.append(child)
        child.expect("lists the commands")
        child.first_screen = child.before
        if changes.get("TERM") != "dumb":
            child.expect(PROMPT)
        return child

    yield start
    for child in running:
        if child.isalive():
            child.kill(signal.SIGKILL)
        child.close()


@pytest.fixture
def run(environment, monkeypatch):
    """`run(text, *arguments)` runs `mlxlm chat` in this process, with `text` on standard input."""
    for name in ("XDG_STATE_HOME", "TERM"):
        monkeypatch.setenv(name, environment[name])
    return lambda text, *arguments: run_command("chat", *arguments, stdin=text)


@pytest.fixture
def piped(run, model_folder):
    """`run` with the model."""
    return lambda text, *arguments: run(text, str(model_folder), "--temperature", "0", *arguments)
