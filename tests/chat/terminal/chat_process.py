"""What tests type into a chat in a terminal, and what it saves."""

import json
import sys

import pexpect

MLXLM = [sys.executable, "-c", "from mlxlm.cli.main import main; main()"]
PROMPT = r"\d+% \x1b\[0;1m>"  # in bold: no answer can look like it, since its control characters are replaced
ANSWERING = r"\x1b\[J\x1b\[\?7h\x1b\[\?2026l.{50}"  # the line that is there while the message is read has gone


def say(chat, line, *answers):
    """Type a line, see these answers in order, and then the prompt."""
    chat.send(f"{line}\r")
    for answer in answers:
        chat.expect(answer)
    chat.expect(PROMPT)


def leave(chat, keys="\x04", status=0):
    """End the chat, and return what it printed."""
    chat.send(keys)
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == status
    return chat.before


def choose(chat, keys, *answers):
    """Open the list of saved conversations, and type into it."""
    chat.send("/sessions\r")
    chat.expect("Esc leaves")
    chat.send(keys)
    for answer in (*answers, PROMPT):
        chat.expect(answer)
    return chat.before


def questions_in(path):
    return [message["content"] for message in messages_in(path)][::2]


def unnamed_sessions(tmp_path):
    """The files of conversations without a name."""
    return sorted((tmp_path / "state" / "mlxlm" / "chats").glob("*.jsonl"))


def messages_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]
