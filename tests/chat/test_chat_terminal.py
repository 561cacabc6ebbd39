"""The chat as a person meets it: in a real pseudo-terminal, over a pipe, and as a single question."""

import os
import signal
import subprocess
import sys
from functools import partial

import pexpect
import pytest

MLXLM = [sys.executable, "-c", "from mlxlm.cli.main import main; main()"]
PROMPT = r"\x1b\[0;1m>"  # in bold: no answer can look like it, since its control characters are replaced


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture
def terminal(model_folder, environment):
    """`terminal(*arguments)` starts a chat; it is ended with the test."""
    running = []

    def start(*arguments):
        command = [*MLXLM, "chat", str(model_folder), "--temperature", "0", *arguments]
        child = pexpect.spawn(
            command[0], command[1:], env=environment, encoding="utf-8", timeout=20, dimensions=(40, 100)
        )
        running.append(child)
        child.expect("lists the commands")
        child.expect(PROMPT)
        return child

    yield start
    for child in running:
        child.close(force=True)


def piped(model_folder, environment, text, *arguments):
    command = [*MLXLM, "chat", str(model_folder), "--temperature", "0", *arguments]
    return subprocess.run(command, input=text, env=environment, capture_output=True, timeout=60)


def test_a_conversation(terminal, tmp_path):
    chat = terminal("-n", "12")
    chat.send("Hello!\r")
    chat.expect(r"cut off at --max-tokens")
    chat.expect(PROMPT)
    chat.send("/stats\r")
    chat.expect(r"answers: 1, 12 tokens; context: \d+ of 4096 tokens")
    chat.expect(r"0 kept from before")
    chat.send("And you?\r")
    chat.expect(r"cut off at --max-tokens")
    chat.send("/stats\r")
    chat.expect(r"answers: 2, 24 tokens")
    chat.expect(r"[1-9]\d* kept from before")
    chat.send("/reset\r")
    chat.expect("the conversation is forgotten")
    chat.send("/stats\r")
    chat.expect("context: 0 of 4096")
    chat.send("/help\r")
    chat.expect("/exit +leave the chat")
    chat.send("/quit\r")
    chat.expect("there is no command /quit .*/help /reset /stats /exit")
    chat.send("/exit\r")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    history = tmp_path / "state" / "mlxlm" / "chat_history"
    assert "+And you?" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal):
    chat = terminal("-n", "4000")
    for question in ("Hello!", "Again"):
        chat.send(f"{question}\r")
        chat.expect(r"\n.{200}")  # the answer is under way
        chat.sendintr()
        chat.expect(r"\(stopped\)", timeout=10)
        chat.expect(PROMPT)
    chat.send("/stats\r")
    chat.expect(r"answers: 2, \d+ tokens")
    chat.expect(PROMPT)
    chat.sendintr()
    chat.expect("Ctrl-D leaves the chat")
    chat.expect(PROMPT)
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


def test_ctrl_c_while_a_long_message_is_read(model_folder, environment):
    """Between two chunks of the message; `ask` then raises before there is an answer."""
    script = (
        "import os, signal\n"
        "from mlxlm.chat import terminal\n"
        "from mlxlm.chat.session import ChatSession\n"
        "from mlxlm.generation import load\n"
        f"session = ChatSession(load({str(model_folder)!r}))\n"
        "with terminal._noted_interrupts() as interrupted:\n"
        "    ask = session.ask\n"
        "    def interrupted_ask(text, on_prefill):\n"
        "        return ask(text, on_prefill=lambda n: (os.kill(os.getpid(), signal.SIGINT), on_prefill(n)))\n"
        "    session.ask = interrupted_ask\n"
        "    terminal._answer_interruptibly(session, 'Hello! ' * 300, interrupted)\n"
        "assert session.messages == []\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "(stopped)\n")


def test_up_recalls_the_last_line_and_control_characters_are_replaced(terminal):
    chat = terminal("-n", "300")
    chat.send("/stats\r")
    chat.expect("answers: 0")
    chat.send("\x1b[A\r")
    chat.expect("answers: 0")
    chat.send("Hello!\r")
    chat.expect("cut off")
    assert "\ufffd" in chat.before and "\x07" not in chat.before


def test_an_error_ends_the_turn_only(terminal):
    chat = terminal("-n", "5")
    chat.send("word " * 1500 + "\r")
    chat.expect(r"error: the conversation would have \d+ tokens.*try: /reset, or a shorter message", timeout=30)
    chat.send("Hello!\r")
    chat.expect("cut off")
    chat.send("/exit\r")
    chat.expect(pexpect.EOF)


def test_a_history_that_cannot_be_kept_is_said(terminal, tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    chat = terminal("-n", "5")
    assert "the history of this chat won't be kept" in chat.before + chat.after
    chat.send("/exit\r")
    chat.expect(pexpect.EOF)


def test_over_a_pipe_each_line_is_a_turn(model_folder, environment):
    done = piped(model_folder, environment, b"Hello!\n\n/stats\nAnd you?\n//slash\n/exit\nnot read\n", "-n", "9")
    assert done.returncode == 0
    assert b"\x1b[" not in done.stdout + done.stderr and b">" not in done.stderr
    assert done.stderr.startswith(b"answers: 1, 9 tokens")
    again = piped(model_folder, environment, b"Hello!\n", "-n", "9")
    assert done.stdout.startswith(again.stdout) and len(done.stdout) > len(again.stdout)
    assert again.stderr == b""


def test_over_a_pipe_an_error_is_the_exit_code(model_folder, environment):
    done = piped(model_folder, environment, b"Hello!\n\xff\xfe\n", "-n", "5")
    assert done.returncode == 1
    assert done.stderr == b"error: line 2 of standard input is not UTF-8: invalid start byte\n"


def test_one_question(model_folder, environment):
    once = piped(model_folder, environment, b"", "-n", "9", "-p", "Hello!")
    assert (once.returncode, once.stderr) == (0, b"")
    assert once.stdout == piped(model_folder, environment, b"Hello!\n", "-n", "9").stdout
    system = piped(model_folder, environment, b"", "-n", "9", "-p", "Hello!", "--system", "Be brief.")
    assert system.stdout != once.stdout


def test_ctrl_c_over_a_pipe_ends_the_program(model_folder, environment):
    command = [*MLXLM, "chat", str(model_folder), "-n", "4000", "-p", "Hello!"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}  # too small for the whole answer
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells ignore it in what runs in the background
    running = subprocess.Popen(command, env=environment, preexec_fn=heard, **pipes)
    running.stdout.read(20)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert (running.returncode, stderr) == (130, b"interrupted\n")
