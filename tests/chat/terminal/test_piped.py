"""`mlxlm chat` over a pipe, and with `--prompt`."""

import errno
import json
import re
import signal
import subprocess
from functools import partial

import pexpect
import pytest

from tests.chat.terminal.chat_process import MLXLM, questions_in


def test_over_a_pipe_each_line_is_a_turn(piped, tmp_path):
    done = piped(b"Hello!\n\n/stats\nAnd you?\n//slash\n/exit\nnot read\n", "-n", "9")
    assert done.returncode == 0
    assert b"\x1b[" not in done.stdout + done.stderr and b">" not in done.stderr
    assert b"answers: 1, 9 tokens" in done.stderr
    again = piped(b"Hello!\n", "-n", "9")
    assert done.stdout.startswith(again.stdout) and len(done.stdout) > len(again.stdout)
    assert again.stderr == b""
    assert not (tmp_path / "state").exists()  # a script keeps what it wants itself


def test_over_a_pipe_blocks_have_several_lines(piped):
    done = piped(b'"""one\ntwo"""\n/show messages\n', "-n", "5")
    assert b"user:\none\ntwo\n" in done.stderr
    open_block = piped(b'Hello!\n"""one\ntwo\n', "-n", "5")
    assert (open_block.returncode, open_block.stderr) == (
        1, b'error: the block that starts in line 2 isn\'t closed (try: """)\n',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "what"),
    [([], "this conversation"), (["-p", "Hi"], "this conversation"), (["--save-kv-cache"], "the key")],
)
def test_a_named_conversation_that_can_not_be_saved_is_the_exit_code(piped, tmp_path, monkeypatch, arguments, what):
    def no_space(*_, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    full = "mlxlm.cache.prompt_cache_file.write_tensors" if "--save-kv-cache" in arguments else "os.fsync"
    monkeypatch.setattr(full, no_space)
    done = piped(b"Hello!\n", "-n", "5", "--session", str(tmp_path / "named"), *arguments)
    assert done.returncode == 1 and done.stdout
    assert done.stderr.startswith(f"error: {what}".encode()) and done.stderr.count(b"No space left on device") == 1


def test_over_a_pipe_an_error_is_the_exit_code(piped):
    done = piped(b"Hello!\n\xff\xfe\n", "-n", "5")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: line 2 of standard input is not UTF-8: invalid start byte at byte 0 (try: ")
    for line, problem in ((b"context_overflow ask", b"requires a terminal"), (b"markdown on", b"requires a terminal")):
        done = piped(b"/set " + line)
        assert done.returncode == 1 and problem in done.stderr


def test_a_session_of_a_model_that_is_not_here_and_its_escapes(run, model_folder, environment, tmp_path):
    """A file from elsewhere neither downloads a model nor drives the terminal."""
    session = tmp_path / "s.jsonl"
    session.write_text(json.dumps({"mlxlm_chat": 1, "model": "no/\x1b]0;x\x07\x9b2J", "options": {"seed": 1}}) + "\n")
    left_out = run(b"", "--session", str(session), "-p", "x")
    assert left_out.returncode == 1 and b"isn't on this machine" in left_out.stderr
    child = pexpect.spawn(
        MLXLM[0], [*MLXLM[1:], "chat", str(model_folder), "--session", str(session), "-n", "3", "-p", "x"],
        env=environment, timeout=30,
    )  # fmt: skip
    seen = child.read()
    child.close()
    assert b"another model" in seen
    for written in (left_out.stderr, seen):
        assert b"\x1b]" not in written and b"\x07" not in written and b"\xc2\x9b" not in written


def test_a_session_of_a_revision_that_is_not_here(run, tmp_path, monkeypatch):
    """Another revision of the same repository doesn't count."""
    (tmp_path / "models--x--y" / "refs").mkdir(parents=True)
    (tmp_path / "models--x--y" / "refs" / "main").write_text("0" * 40)
    session = tmp_path / "s.jsonl"
    session.write_text(json.dumps({"mlxlm_chat": 1, "model": "x/y@refs/pr/7", "options": {"seed": 1}}) + "\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = run(b"", "--session", str(session), "-p", "x")
    assert done.returncode == 1 and b"isn't on this machine" in done.stderr
    (tmp_path / "models--x--y").rename(tmp_path / "none")
    nothing = run(b"", "--continue")
    assert nothing.returncode == 1 and b"there is no conversation to continue" in nothing.stderr


def test_one_question(piped, tmp_path):
    once = piped(b"", "-n", "9", "-p", "Hello!")
    assert (once.returncode, once.stderr) == (0, b"")
    assert once.stdout == piped(b"Hello!\n", "-n", "9").stdout
    system = piped(b"", "-n", "9", "-p", "Hello!", "--system-prompt", "Be brief.")
    assert system.stdout != once.stdout
    cached = tmp_path / "c.jsonl"
    piped(b"Hello!\n/exit\n", "-n", "9", "--session", str(cached), "--save-kv-cache")
    assert cached.with_name("c.jsonl.cache.safetensors").exists()
    session = tmp_path / "s.jsonl"
    for question in ("Hello!", "And?"):
        done = piped(b"", "-n", "9", "-p", question, "--session", str(session))
        assert (done.returncode, done.stderr) == (0, b"")
    assert questions_in(session) == ["Hello!", "And?"]


def test_files_of_one_question(piped, tmp_path, monkeypatch):
    """Mentions in the message add files; those in what is piped in don't."""
    (tmp_path / "a.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    session = tmp_path / "s.jsonl"
    done = piped(b"", "-n", "5", "-f", "a.py", "-p", "Explain @a.py.", "--session", str(session))
    assert done.returncode == 0 and re.fullmatch(rb"a.py: \d+ tokens; [\d,]+ of 4,096 are left\n", done.stderr)
    piped(b"See @a.py", "-n", "5", "-p", "-", "--session", str(session))
    assert questions_in(session) == ["File: a.py\n```\nprint(1)\n```\n\nExplain a.py.", "See @a.py"]
    failed = piped(b"", "-f", "missing.txt", "-p", "Hi")
    assert failed.returncode == 1 and failed.stderr.startswith(b"error: cannot read missing.txt")


def test_a_message_that_follows_the_model(run, model_folder):
    done = run(b"", str(model_folder), "hi", "there")
    assert done.returncode == 2 and b"(try: -p 'hi there')" in done.stderr


def test_one_question_with_what_is_piped_in(piped, model_folder, environment, tmp_path):
    session = tmp_path / "s.jsonl"
    command = [*MLXLM, "chat", str(model_folder), "-n", "9", "-p", "Summarize", "--session", str(session)]
    done = subprocess.run(command, input=b"Two\nlines\n", env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    piped(b"Two\nlines\n", "-n", "9", "-p", "-", "--session", str(session))
    assert questions_in(session) == ["Two\nlines\n\nSummarize", "Two\nlines"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--save-kv-cache",),
        ("--continue", "--private"),
        ("--kv-keep", "3"),
        ("--context-overflow", "ask"),
        ("-p", "x", "--context-overflow", "ask"),
        ("-p", "x", "--markdown"),
        ("-n", "0"),
    ],
)
def test_options_that_need_others(piped, arguments):
    done = piped(b"", *arguments)
    assert done.returncode == 2 and done.stderr.startswith(b"Usage: ")


def test_ctrl_c_over_a_pipe_ends_the_program(model_folder, environment):
    command = [*MLXLM, "chat", str(model_folder), "-n", "4000", "-p", "Hello!"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}  # too small for the whole answer
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells ignore it in what runs in the background
    running = subprocess.Popen(command, env=environment, preexec_fn=heard, **pipes)
    running.stdout.read(20)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert (running.returncode, stderr) == (130, b"interrupted\n")
