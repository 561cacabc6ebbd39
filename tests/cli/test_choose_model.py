"""`mlxlm chat` without MODEL."""

from __future__ import annotations

import os

import pexpect
import pytest

from mlxlm.checkpoint.catalog import default_entry
from tests.cli.helpers import MLXLM, run_process


@pytest.fixture
def terminal(home):
    """`terminal(*arguments)`: starts `mlxlm chat` in a terminal."""
    processes = []

    def start(*arguments) -> pexpect.spawn:
        command = [*MLXLM[1:], "chat", *arguments]
        process = pexpect.spawn(MLXLM[0], command, env=home, timeout=60, encoding="utf-8", dimensions=(40, 120))
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close(force=True)


def exit_code(process: pexpect.spawn) -> int:
    process.expect(pexpect.EOF)
    process.close()
    return process.exitstatus


def test_without_a_terminal_it_says_what_works(home):
    result = run_process("chat", "-p", "Hello", env=home)
    assert result.returncode == 2 and "MODEL is missing (try: --yes for smollm2-135m, 98.4 MB" in result.stderr


def test_yes_takes_the_default(home):
    result = run_process("chat", "-p", "Hello", "--yes", "--offline", env=home)
    assert result.returncode == 1 and "smollm2-135m isn't on this machine, and downloads are forbidden" in result.stderr


def test_yes_has_no_effect_with_a_model(home, model):
    result = run_process("chat", model, "--yes", env=home)
    assert result.returncode == 2 and "--yes would have no effect: MODEL is given" in result.stderr


def test_enter_takes_the_default(terminal):
    chat = terminal("--offline")
    chat.expect("1  smollm2-135m  small, downloaded in seconds")
    chat.expect("98.4 MB to download.*apache-2.0")
    chat.expect(r"Model \[1\]: ")
    chat.sendline("")
    chat.expect("error: smollm2-135m isn't on this machine")
    assert exit_code(chat) == 1


def test_a_wrong_answer_is_asked_again_and_any_model_works(terminal, model):
    chat = terminal()
    chat.expect(r"Model \[1\]: ")
    chat.sendline("smolm3-3b")
    chat.expect(r"there is no model 'smolm3-3b' \(try: smollm3-3b\)")
    chat.expect(r"Model \[1\]: ")
    chat.sendline(str(model))
    chat.expect("/help lists the commands")
    chat.sendeof()
    assert exit_code(chat) == 0


def test_a_default_on_disk_needs_no_download(terminal, home):
    entry = default_entry()
    os.mkdir(home["MLXLM_MODELS"])
    with open(os.path.join(home["MLXLM_MODELS"], entry.file), "wb") as file:
        file.truncate(entry.bytes)
    chat = terminal()
    chat.expect("small, on this machine already")
    chat.expect("no download")
    chat.expect(r"Model \[1\]: ")
    chat.sendcontrol("c")
    assert exit_code(chat) == 130
