"""The commands of a chat that save it, and open others: /save, /load, /sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.first_screen import model_name
from mlxlm.chat.terminal.interrupts import raise_interrupts
from mlxlm.chat.terminal.output import print_status
from mlxlm.chat.terminal.session_list import is_model_here
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.chat.terminal.repl import Repl


def save(repl: Repl, text: str) -> None:
    """Save the chat to a file, to which every new answer is added."""
    name, cached = text.removesuffix("--save-kv-cache").strip(), text.endswith("--save-kv-cache")
    path = Path(expanded(name)) if name else repl.autosave.path if repl.autosave.named else None
    if path is None:
        raise GenerationError("there is no file yet to save to", "/save FILE")
    repl.autosave.save(repl.chat, path, cached)
    repl.autosave.set_path(path, cached)
    print_status(f"saved to {path}; new messages are added to it")


def load(repl: Repl, name: str) -> None:
    """Continue the chat of a file, with the present model."""
    if not name:
        raise GenerationError("there is no file to load", "/load FILE")
    path = Path(expanded(name))
    with raise_interrupts():
        chat = Chat.open(path, repl.chat.lm, **repl.chat_arguments)
    repl.replace_chat(chat, path)


def sessions(repl: Repl, _: str) -> None:
    """Let the user choose a chat of the private folder, and continue it with its model."""
    session = repl.choose_session()
    if session is None or session.path == repl.autosave.path:
        return
    lm = repl.chat.lm
    if session.model != str(lm.path) and not is_model_here(session.model):
        problem = f"this is a chat with {session.model}, which isn't on this machine"
        raise GenerationError(problem, f"/load {session.path} to continue it with {model_name(lm)}")
    with raise_interrupts():
        lm = lm if session.model == str(lm.path) else repl.load(session.model)
        chat = Chat.open(session.path, lm, **repl.chat_arguments)
    repl.autosave.save_changes(repl.chat)
    repl.replace_chat(chat, session.path, named=False)


def expanded(name: str) -> str:
    """Return a path without quotes, with ~ replaced by the home folder."""
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    return str(Path(name[1:-1] if quoted else name).expanduser())
