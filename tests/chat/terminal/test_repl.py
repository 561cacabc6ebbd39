"""`mlxlm chat` in a pseudo-terminal."""

import json
import os
import re
import signal
import sys
import termios
import time
from functools import partial

import pexpect
import pytest

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.screen import open_screen
from mlxlm.chat.terminal.terminal_chat import defer_interrupts, stream_answer
from tests.chat.terminal.chat_process import (
    ANSWERING,
    PROMPT,
    choose,
    leave,
    messages_in,
    questions_in,
    say,
    unnamed_sessions,
)


def test_a_conversation_is_continued_with_its_model(terminal, tmp_path):
    chat = terminal("-n", "12")
    say(chat, "Hello!", "cut off at max_tokens")
    say(chat, "/stats", r"answers: 1, 12 tokens; context: \d+ of 4096 tokens", "0 from the cache")
    say(chat, "And you?", "cut off at max_tokens")
    say(chat, "/stats", "answers: 2, 24 tokens", r"[1-9]\d* from the cache", "each token reads", "% of this machine")
    say(chat, "/tokens", r"user +Hello!", "assistant", r"user +And you\?", "in total")
    say(chat, "/retry", "cut off")
    say(chat, "/undo", r"removed: And you\?")
    say(chat, "/show messages", "user:", "Hello!", "assistant:")
    say(chat, "/hepl", r"there is no command /hepl \(try: /help")
    say(chat, "/help", r"/reset .*/clear", r"/exit +leave .*/bye", "Alt-Enter")
    assert chat.before.count("\n") < 20
    assert "this conversation is saved: mlxlm chat --continue" in leave(chat, "/exit\r")
    history = tmp_path / "state" / "mlxlm" / "chat_history"
    assert "+And you?" in history.read_text()
    (session,) = unnamed_sessions(tmp_path)
    assert questions_in(session) == ["Hello!"]
    modes = [p.stat().st_mode & 0o777 for p in (history, session, session.parent)]
    assert modes == [0o600, 0o600, 0o700]
    chat = terminal("--continue")
    assert "Continuing after 2 messages" in chat.first_screen
    assert re.search(r"user:.*Hello!.*assistant:", chat.before, re.DOTALL)  # the last exchange
    say(chat, "/set max_tokens 5")
    say(chat, "More", "cut off")
    say(chat, "/set context_overflow drop")
    leave(chat)
    assert unnamed_sessions(tmp_path) == [session] and questions_in(session) == ["Hello!", "More"]
    chat = terminal("--continue")
    say(chat, "/set context", r"context_overflow +drop")
    (tmp_path / "tiny").rename(tmp_path / "moved")
    say(chat, f"/model {tmp_path / 'moved'}", "continues with this model")
    leave(chat)
    assert json.loads(session.read_text().splitlines()[0])["model"].endswith("moved")


def test_enter_sends_an_example_once(terminal, model_folder, tmp_path):
    chat = terminal("-n", "5")
    assert re.search(r"tiny.*\n.* parameters, .* of memory, a context of 4,096 tokens", chat.first_screen)
    chat.expect(r"Why is the sky blue\?  \(press Enter\)")
    say(chat, "/branch", r"main: 0 turns")
    say(chat, "", "cut off")
    say(chat, "", PROMPT)  # nothing happens
    (session,) = unnamed_sessions(tmp_path)
    assert questions_in(session) == ["Why is the sky blue?"]
    say(chat, "/reset", "is removed")
    assert "example" not in leave(chat)
    (model_folder / "generation_config.json").write_text('{"example_prompt": "Count to 3."}')
    chat = terminal("-n", "5")
    chat.expect("Count to 3.  ")
    say(chat, "Hi", "cut off")
    leave(chat)
    chat = terminal("--continue")
    say(chat, "", PROMPT)
    assert "Count" not in leave(chat)
    dumb = terminal("-n", "5", TERM="dumb")
    dumb.send("\r/branch\r")
    dumb.expect("main: 0 turns")  # no example: it can't be shown


def test_settings_branches_edits_and_abbreviations(terminal):
    chat = terminal("-n", "5")
    say(chat, "/system Be brief.", "system prompt: Be brief.")
    say(chat, "/set top-k 3", r"top_k +3")
    say(chat, "/set", r"reasoning +dim", r"context_overflow +ask", r"top_k +3", r"max_tokens +5")
    say(chat, "One", "cut off")
    say(chat, "/branch other", "in a new branch, other")
    say(chat, "Two", "cut off")
    say(chat, "/branch", r"main: 1 turn\r", r"\* other: 2 turns")
    say(chat, "/branch main", "in branch main")
    say(chat, "/show", "chat_template +model", r"branch +main of main, other")
    chat.send("/edit\r")
    chat.expect(PROMPT + ".*One")
    say(chat, " more", "cut off")
    say(chat, "/tokens", "user +One more")
    say(chat, '/system """\rYou are\rbrief."""', "system prompt: You are\r\nbrief.")
    say(chat, "//etc?", "cut off")
    chat.send("/edit\r")
    chat.expect('>.*""".*/etc.*"""')  # in a block: it is no command
    say(chat, "", "cut off")
    say(chat, "/tokens", r"user +/etc\?")
    say(chat, "/set temp 0.5", r"temperature +0\.5")
    say(chat, "/set top-", r"error: top_ could be top_k, top_p or top_n_sigma \(try: more of its letters")
    say(chat, "/s temp 0.5", "error: /s could be /system, /set, /show, /stats, /save or /sessions")
    say(chat, "/show set", r"temperature +0\.5")
    say(chat, "/", "error: there is no command / ")
    say(chat, "/?", r"/help \[TOPIC\] +show this")
    say(chat, "/? quit", r"/exit +leave")
    for short in ("/cl", "/by", "/q"):
        say(chat, short, f"error: there is no command {short} ")
    say(chat, "/clear", "the conversation is removed")
    say(chat, "/tok", "0  in total")
    say(chat, "/sh sys\t", "system prompt: You are")
    chat.send("/b\t\t")
    chat.expect("/branch +/bye")
    chat.send("\x03")
    chat.expect(PROMPT)
    leave(chat, "/bye\r")


def test_the_last_answer_is_edited_and_continued(terminal, tmp_path, piped):
    chat = terminal("-n", "5", "--no-markdown")
    say(chat, "/continue", "error: there is no answer yet")
    say(chat, "One", "cut off")
    say(chat, "/continue The quick", "The quick.*cut off")
    (session,) = unnamed_sessions(tmp_path)
    question, answer = messages_in(session)
    assert question["content"] == "One" and answer["content"].startswith("The quick")
    chat.send("/cont\r")
    chat.expect("Enter continues it")
    chat.expect(PROMPT + ".*The quick")
    say(chat, "\x15//fox", "/fox.*cut off")  # the message of an answer can start with a slash, too
    assert messages_in(session)[1]["content"].startswith("/fox") and len(messages_in(session)) == 2
    chat.send("/cont\r")
    chat.expect('>.*""".*/fox.*"""')
    say(chat, "", "cut off")
    say(chat, "Two", "cut off")  # a message again
    leave(chat)
    assert questions_in(session)[1] == "Two"
    out = piped(b'One\n/continue The quick\n/continue\n/continue """\nThe\nlazy"""\n', "-n", "5").stdout.decode()
    first, second = re.findall("The quick.*", out)
    assert second.startswith(first) and second != first and "The\nlazy" in out


def test_sessions_are_saved_and_loaded(terminal, tmp_path, piped):
    chat = terminal("-n", "9")
    say(chat, "Hello!", "cut off")
    saved = tmp_path / "a chat.jsonl"
    say(chat, f"/save {saved} --save-kv-cache", "saved to")
    assert unnamed_sessions(tmp_path) == []  # it has a name now
    say(chat, "More", "cut off")
    assert questions_in(saved)[1] == "More"  # and is kept up to date
    say(chat, "/reset", "the conversation is removed; /load")
    say(chat, "/tokens", "0 +in total")
    say(chat, "New", "cut off")
    assert len(messages_in(saved)) == 4
    say(chat, f"/load {saved}", "4 messages")
    say(chat, "/load nothing", "error: cannot read nothing: No such file")
    say(chat, "And?", "cut off")
    say(chat, "/stats", r"[1-9]\d* from the cache")  # from the cache beside the file
    assert saved.stat().st_mode & 0o777 == 0o600
    assert f"--session '{saved}'" in leave(chat).replace("\r\n", " ")
    assert len(messages_in(saved)) == 6
    shown = piped(b"/show messages\n", "--session", str(saved)).stderr.decode()
    assert re.search(r"(?s)Hello!.*More.*And\?", shown)


def test_a_saved_conversation_is_chosen(terminal, tmp_path, piped, run):
    chat = terminal("-n", "5", "--private")
    say(chat, "/sessions", "error: there is no saved conversation")
    leave(chat)
    chat = terminal("-n", "5")
    say(chat, "About foxes", "cut off")
    leave(chat)
    (first,) = unnamed_sessions(tmp_path)
    chat = terminal("-n", "5")
    say(chat, "About dogs", "cut off")
    second = next(path for path in unnamed_sessions(tmp_path) if path != first)
    choose(chat, "fox\r", "2 messages; new messages are added to them")
    say(chat, "More", "cut off")
    for keys in ("\x1b", "\x03", "\r"):  # the one that is open is the newest
        assert "new messages" not in choose(chat, keys)
    assert "--continue" in leave(chat)
    assert questions_in(first) == ["About foxes", "More"] and questions_in(second) == ["About dogs"]
    moved = second.read_text().replace(str(tmp_path / "tiny"), "/no/such/model")
    second.write_text(moved)
    chat = terminal("-n", "5")
    choose(chat, "dogs\r", r"error: this is a chat with /no/such/model, which isn't on this\s+machine\s+\(try:")
    leave(chat)
    done = run(b"", "--sessions")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert done.returncode == 0 and [row[1:] for row in rows] == [
        ["model", "2", "About dogs", str(second)], ["tiny", "4", "About foxes", str(first)]
    ]  # fmt: skip
    assert piped(b"/sessions\n").stdout == done.stdout
    assert b"exclude each other" in run(b"", "--sessions", "--private").stderr
    assert b"exclude each other" in run(b"", "--sessions", "-p", "Hi").stderr


def test_the_line_editor_and_a_private_chat(terminal, tmp_path):
    (tmp_path / "a-long-name.jsonl").write_text("")
    chat = terminal("-n", "5", "--private")
    say(chat, "/bra\t", "main: 0 turns")
    say(chat, "\x1b[A", "main: 0 turns")  # up: the last line again
    say(chat, "/set reasoning hi\t")
    say(chat, "/set reas", r"reasoning +hide")
    say(chat, "/set temper\t0.5", r"temperature +0\.5")
    say(chat, f"/load {tmp_path}/a-lo\t", r"error: .*a-long-name.jsonl")
    for keys in ("\x07", "\x18\x05"):  # an external editor
        chat.send(f"draft{keys}")
        chat.expect("draft.*, edited")
        say(chat, "", "cut off")
    say(chat, '"""first\rsecond"""', "cut off")
    say(chat, "\x1b[200~pasted\nlines\x1b[201~\x1b\rtyped", "cut off")
    say(chat, "/show messages", "draft, edited", "first\r\nsecond\r\n", "pasted\r\nlines\r\ntyped\r\n")
    say(chat, f"/save {tmp_path / 's.jsonl'}", "saved to")
    say(chat, "/reset", "is removed")
    say(chat, "Secret", "cut off")
    assert "--continue" not in leave(chat)
    assert "first" in (tmp_path / "s.jsonl").read_text() and "Secret" not in (tmp_path / "s.jsonl").read_text()
    assert not (tmp_path / "state").exists()


def set_context(model_folder, length):
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))


def stop_answer(chat):
    chat.sendintr()
    chat.expect(r"\(stopped\)", timeout=10)


def test_the_keyboard_during_an_answer(terminal, model_folder, tmp_path):
    set_context(model_folder, 1 << 16)  # no answer ends by itself
    chat = terminal("-n", "16000", "--no-markdown")
    for question in ("Hello!", "Again"):  # Ctrl-C stops the answer, not the chat
        chat.send(f"{question}\r")
        chat.expect(ANSWERING)
        stop_answer(chat)
        chat.expect(PROMPT)
    say(chat, "/stats", r"answers: 2, \d+ tokens")
    chat.sendintr()
    chat.expect("Ctrl-D leaves the chat")
    chat.expect(PROMPT)
    chat.send("Hello!\r")  # what is typed before a Ctrl-C is in the next line
    chat.expect(ANSWERING)
    chat.send("And now")
    stop_answer(chat)
    chat.expect(PROMPT + ".*And now")
    chat.send(" this\r")
    chat.expect(ANSWERING)
    stop_answer(chat)
    chat.expect(PROMPT)
    chat.send("Hel\x1alo!\r")  # Ctrl-Z is no part of a message, and the keyboard is quiet again afterwards
    chat.expect(ANSWERING)
    modes = termios.tcgetattr(chat.child_fd)
    modes[3] |= termios.ECHO | termios.ICANON  # as a shell does
    termios.tcsetattr(chat.child_fd, termios.TCSANOW, modes)
    os.kill(chat.pid, signal.SIGCONT)
    assert chat.waitnoecho(10)
    stop_answer(chat)
    chat.expect(PROMPT)
    assert questions_in(unnamed_sessions(tmp_path)[0]) == ["Hello!", "Again", "Hello!", "And now this", "Hello!"]


def test_what_is_typed_or_pasted_during_an_answer_is_the_next_message(terminal, tmp_path):
    chat = terminal("-n", "100", "--no-markdown")
    chat.send("Hello!\r")
    chat.expect("\n")
    chat.send("/tokens\r")
    chat.expect("cut off")
    assert "/tokens" not in chat.before
    assert "\ufffd" in chat.before and "\x07" not in chat.before  # control characters are replaced
    chat.expect("in total")
    chat.expect(PROMPT)
    chat.send("Again\r")
    chat.expect(ANSWERING)
    assert re.findall(r"\x1b\[\?2004[hl]", chat.before)[-1].endswith("h")  # the terminal marks what is pasted
    chat.send("\x1b[200~two\nlines\x1b[201~")
    chat.expect("cut off")
    chat.expect("two.*lines")
    chat.send("\r")
    chat.expect("cut off")
    chat.expect(PROMPT)
    assert questions_in(unnamed_sessions(tmp_path)[0])[2] == "two\nlines"
    assert re.findall(r"\x1b\[\?2004[hl]", leave(chat))[-1].endswith("l")


def test_ctrl_c_while_a_long_message_is_read(lm, capsys):
    """Between two chunks of the message; `ask` then raises before there is an answer."""
    chat = Chat(lm)

    def start(on_prefill):
        def interrupt(tokens_read):
            os.kill(os.getpid(), signal.SIGINT)
            on_prefill(tokens_read)

        return chat.ask("Hello! " * 300, on_prefill=interrupt)

    with defer_interrupts() as stop:
        assert stream_answer(chat, start, partial(open_screen, "dim", True), stop) is None
    assert chat.messages == [] and chat.stats.answers == 0
    assert capsys.readouterr() == ("\n", "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_terminal_that_is_closed_loses_nothing(terminal, tmp_path, number):
    chat = terminal("-n", "4000", "--no-markdown")
    say(chat, "/set max_tokens 5")
    say(chat, "Hello!", "cut off")
    say(chat, "/set max_tokens 4000")
    chat.send("Again\r")
    chat.expect(ANSWERING)
    os.kill(chat.pid, number)
    leave(chat, "", {signal.SIGHUP: 129, signal.SIGTERM: 143}.get(number))
    questions = questions_in(unnamed_sessions(tmp_path)[0])
    assert questions == (["Hello!"] if number == signal.SIGKILL else ["Hello!", "Again"])


def test_a_terminal_that_disappears_at_the_prompt_loses_nothing(terminal, tmp_path):
    chat = terminal("-n", "5")
    say(chat, "Hello!", "cut off")
    chat.ptyproc.fileobj.close()  # the other end of the pseudo-terminal
    deadline = time.monotonic() + 20
    while chat.isalive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not chat.isalive()
    assert len(messages_in(unnamed_sessions(tmp_path)[0])) == 2


def pasted(text):
    """`text` as a terminal sends what is pasted, which is much faster than keys."""
    return f"\x1b[200~{text}\x1b[201~"


def fill(chat):
    """Talk until the context is full and the chat asks what to do."""
    say(chat, pasted("word " * 150), "cut off")
    for _ in range(2):
        chat.send(pasted("word " * 250) + "\r")
        chat.expect(r"cut off|Drop the oldest turns\? \[y/N\]")
        if "Drop" in chat.after:
            return
        chat.expect(PROMPT)


def test_long_messages_and_a_full_context(terminal, model_folder, tmp_path):
    set_context(model_folder, 2048)
    chat = terminal("-n", "5")
    # The error about a message higher than the screen stays visible.
    chat.setwinsize(12, 60)
    say(chat, "🎈" * 400, "cut off")  # 4 tokens each
    assert messages_in(unnamed_sessions(tmp_path)[0])[0]["content"] == "🎈" * 400
    chat.send("🎈" * 600 + "\r")
    chat.expect(r"error: the message takes \d+ tokens")
    chat.send("!")  # it can be edited
    chat.expect("!")
    drawn = chat.before
    chat.send("\x03")
    chat.expect(PROMPT)
    below = deepest = 0  # rows between the error and the cursor
    for line_end, up in re.findall(r"(\n)|\x1b\[(\d*)A", drawn):
        below += 1 if line_end else -int(up or 1)
        deepest = max(deepest, below)
    assert 5 <= deepest < 10
    say(chat, "/reset", "is removed")
    chat.setwinsize(40, 160)
    # A full context is cleared when asked.
    fill(chat)
    say(chat, "n", "error: the conversation would have .* /set context_overflow drop")
    chat.send("\r")  # the message is still there
    chat.expect("Drop the oldest turns")
    say(chat, "y", r"\d messages dropped: the model no longer sees them", "cut off")
    say(chat, "/tokens", "the model no longer sees it")
    # A hang-up while the chat asks ends it.
    fill(chat)
    chat.kill(signal.SIGHUP)
    leave(chat, "", 129)


@pytest.mark.parametrize("keys", ["\x04", "/exit\r"])
def test_what_is_typed_before_the_first_prompt_reaches_it(model_folder, environment, keys):
    script = (
        "import select; from mlxlm.chat.terminal import repl; from mlxlm.cli.main import main\n"
        "show = repl.print_status\n"
        "repl.print_status = lambda text: (show(text), 'lists the commands' in text and select.select([0], [], []))\n"
        "main()"
    )
    command = ["-c", script, "chat", str(model_folder), "--private"]
    chat = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=15)
    chat.expect("lists the commands")
    leave(chat, keys)


def test_a_dumb_terminal_gets_no_escapes_and_a_state_folder_that_cannot_be_written_is_reported(terminal, tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    chat = terminal("-n", "30", TERM="dumb")
    chat.send("Hello!\r")
    chat.expect("the history of this chat won't be saved")
    chat.expect(r"Hello!\r*\n")
    chat.expect("this conversation is not saved: ")
    chat.expect("cut off")
    assert "\x1b" not in chat.before
    chat.expect("> ")
    leave(chat)


def test_files_in_messages(terminal, tmp_path, model_folder, monkeypatch):
    """Files come first, and an edited message keeps them; what can't be added leaves the message to be changed."""
    for name, text in {"notes.txt": "Some notes.", "my data.csv": "a,b", "long.txt": "word " * 9000}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pic.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    monkeypatch.chdir(tmp_path)
    chat = terminal("-n", "5", "-f", "notes.txt")
    assert re.search(r"notes.txt: \d+ tokens; [\d,]+ of 4,096 are left", chat.first_screen)
    say(chat, "/file", "next message: notes.txt")
    say(chat, "/file none", "next message: none")
    say(chat, "/file my data.csv", r"my data.csv: \d+ tokens", "next message: my data.csv")
    chat.send("Is @pic.png\r")
    chat.expect("error: pic.png is an image")
    chat.expect("Is @pic.png")
    say(chat, "\x15Sum @long.txt", r"error: long.txt has [\d,]+ tokens, but only [\d,]+ of 4,096 are left")
    say(chat, "\x15See @no\t and ann@notes.txt @nobody", r"notes.txt: \d+ tokens", "cut off")
    (session,) = unnamed_sessions(tmp_path)
    sent = "File: my data.csv\n```\na,b\n```\n\nFile: notes.txt\n```\nSome notes.\n```\n\n"
    assert questions_in(session) == [sent + "See notes.txt and ann@notes.txt @nobody"]
    say(chat, "/tokens", r"\[my data.csv\] \[notes.txt\] See notes.txt")
    chat.send("/edit\r")
    chat.expect(PROMPT + ".*See notes.txt and")
    say(chat, "\x15Why?", "cut off")
    assert questions_in(session) == [sent + "Why?"]
    leave(chat)


def test_answers_are_copied_and_exported(terminal, environment, tmp_path):
    program = tmp_path / "xclip"
    program.write_text('#!/bin/sh\ncat > "$COPIED"\n')
    program.chmod(0o755)
    copied, path = tmp_path / "copied", f"{tmp_path}:{environment['PATH']}"
    chat = terminal("-n", "5", PATH=path, DISPLAY=":0", COPIED=str(copied), SSH_CONNECTION="")
    say(chat, "/copy", "error: there is no answer yet")
    say(chat, "/export none.md", "error: there is no message yet")
    say(chat, "Hello!", "cut off")
    say(chat, "/continue Code:\\n", "cut off")
    say(chat, '/continue """Use\r```python\rprint(1)\r```\rnow"""', "cut off")
    say(chat, "/copy 2", r"error: the last answer has no code block 2 \(try: /copy 1\)")
    say(chat, "/copy 1", r"\x1b\]52;c;cHJpbnQoMSkK\x07", "through the terminal")  # SSH: the terminal's clipboard
    exported = tmp_path / "chat.md"
    say(chat, f"/export {exported}", "wrote 2 messages to")
    assert exported.read_text().startswith("# Chat with tiny\n\n## User\n\nHello!\n\n## Assistant\n\nUse\n```python")
    say(chat, f"/export {exported}", "error: .* already exists")
    say(chat, "/show sys", "there is no system prompt")
    leave(chat)


def test_system_prompts_have_names(terminal, piped, tmp_path, monkeypatch):
    chat = terminal("-n", "5", XDG_CONFIG_HOME=str(tmp_path / "config"))
    say(chat, "/system save x", "error: there is no system prompt to save")
    say(chat, "/show mes", "empty")
    say(chat, "/system Be brief.", "system prompt: Be brief.")
    say(chat, "/system save brief", "/system @brief uses it")
    say(chat, "/system save brief", "error: .*brief.txt already exists")
    say(chat, "/system save ../x", "error: '../x' is not a name")
    say(chat, "/system none", "there is no system prompt")
    say(chat, "/system", "there is no system prompt", "saved: @brief")
    say(chat, "/system @b\t", "system prompt: Be brief.")
    leave(chat)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert b"Be brief." in piped(b"/show system\n", "--system", "@brief").stderr
    assert b"no system prompt @nope (try: @brief)" in piped(b"", "--system", "@nope", "-p", "Hi").stderr
