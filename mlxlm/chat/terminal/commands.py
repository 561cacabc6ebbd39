"""The commands of a chat: what begins with a slash."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxlm.backend import bandwidth, platform
from mlxlm.chat.reasoning import split
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import settings, statistics
from mlxlm.chat.terminal.abbreviations import full_name
from mlxlm.chat.terminal.multiline import typed, without_block
from mlxlm.chat.terminal.output import say, tell
from mlxlm.chat.terminal.screen import open_screen
from mlxlm.chat.terminal.statistics import memory_bandwidth
from mlxlm.chat.terminal.stream_answer import raised_interrupts
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.chat.terminal.repl import Talk

_SHOWN = ("model", "system", "settings", "messages", "session")


@dataclass(frozen=True)
class Command:
    """`run(talk, argument)`; `complete(talk)` has the words that can be the argument, PATHS for names of files."""

    usage: str
    help: str
    run: Callable[[Talk, str], None]
    complete: Callable[[Talk], Iterable[str]] = lambda talk: ()


PATHS = "\0paths"


def obey(talk: Talk, line: str) -> None:
    """Do what a line that begins with a slash says. Raises MlxlmError if it can't be done."""
    name, _, argument = line.strip().partition(" ")
    named(name).run(talk, argument.strip())


def named(name: str) -> Command:
    """The command that a word with a slash is or abbreviates. Raises GenerationError if there is none or several.
    Aliases can't be abbreviated: a typing error would forget the conversation."""
    found = name if name in ALIASES else full_name(name, COMMANDS) if name != "/" else None
    if found is None:
        near = difflib.get_close_matches(name, COMMANDS, 1) or ["/help"]
        raise GenerationError(
            f"there is no command {name}", f"{near[0]}; a message that begins with / is typed with //"
        )
    return COMMANDS[ALIASES.get(found, found)]


def _help(talk: Talk, name: str) -> None:
    chosen = [named("/" + name.lstrip("/"))] if name else COMMANDS.values()
    width = max(len(c.usage) for c in chosen)
    for command in chosen:
        tell(f"{command.usage:{width}}  {command.help}")
    if not name:
        tell(_KEYS)


_KEYS = '''
Enter      sends; Alt-Enter begins a new line
"""        opens and closes a message of several lines
Ctrl-G     opens an editor, $VISUAL or $EDITOR (also Ctrl-X Ctrl-E)
Tab        completes
Ctrl-C     stops an answer; Ctrl-D leaves
//         begins a message that begins with /
/und       commands and settings may be shortened: /set temp 0.5
13% >      so full is the context'''


def _system(talk: Talk, text: str) -> None:
    if text:
        talk.chat.system = None if text == "none" else without_block(text)
        talk.autosave.keep(talk.chat)
    say(f"system prompt: {talk.chat.system}" if talk.chat.system else "there is no system prompt")


def _set(talk: Talk, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name and settings.named(name), value.strip()
    if value:
        if not talk.interactive and (name, value) == ("overflow", "ask"):
            raise GenerationError("overflow is ask, and nobody is there to be asked", "stop or drop")
        if not sys.stdout.isatty() and (name, value) == ("markdown", "on"):
            raise GenerationError("markdown is on, and there is no terminal to show it", "off or auto")
        settings.change(talk.settings, talk.chat, name, value)
        if (name, value) == ("stats", "on"):
            memory_bandwidth()
        talk.autosave.keep(talk.chat)
    shown = settings.shown(talk.settings, talk.chat)
    for key in [name] if name else shown:
        tell(f"{key:18} {shown[key]}")


def _show(talk: Talk, what: str) -> None:
    if what:
        if (found := full_name(what, _SHOWN)) is None:
            raise GenerationError(f"there is nothing called {what} to show", ", ".join(_SHOWN))
        what = found
    chat = talk.chat
    if what == "settings":
        return _set(talk, "")
    if what == "system":
        return _system(talk, "")
    if what == "messages":
        return _show_messages(talk)
    rows = {}
    if what in ("", "model"):
        weights = bandwidth.weight_bytes(chat.loaded.model)
        rows["model"] = str(chat.loaded.path)
        rows["template"] = chat.template
        rows["read per token"] = "?" if weights is None else f"{human_bytes(weights)} of weights"
        rows["context"] = f"{chat.context_used} of {chat.context_size} tokens"
    if what in ("", "session"):
        rows["branch"] = f"{chat.branch_name}, of {', '.join(chat.branches)}"
        rows["kept in"] = str(talk.autosave.path or "no file yet")
    for name, value in rows.items():
        tell(f"{name:15} {value}")
    return None


def _show_messages(talk: Talk) -> None:
    """In a terminal the answers look as they did when they came, but for hidden reasoning, which isn't counted."""
    for message in talk.chat.messages:
        say(f"{message.role}:")
        if message.role != "assistant" or not sys.stdout.isatty():
            tell(message.content)
            continue
        screen = open_screen(talk.settings.think, talk.settings.has_markdown(talk.chat))
        thought, answer = split(message.content)
        if talk.settings.think != "hide":
            screen.push(thought, True)
        screen.push(answer, False)
        screen.finish()


def _model(talk: Talk, name: str) -> None:
    if not name:
        return _show(talk, "model")
    with raised_interrupts():
        loaded = talk.load(_expanded(name) if name.startswith("~") else name)
    talk.chat.loaded = loaded
    talk.moved = None
    talk.autosave.keep(talk.chat)
    say("the conversation goes on with this model, which reads it anew")
    return None


def _save(talk: Talk, text: str) -> None:
    """The file is the chat's from now on: every answer is added to it."""
    name = text.removesuffix("--cache").strip()
    if not name and not talk.autosave.named:
        raise GenerationError("there is no file yet to save to", "/save FILE")
    path = Path(_expanded(name)) if name else talk.autosave.path
    talk.autosave.save(talk.chat, path, cache=text.endswith("--cache"))
    talk.autosave.name(path, cached=text.endswith("--cache"))
    say(f"saved to {path}; what is said from now on is added to it")


def _load(talk: Talk, name: str) -> None:
    if not name:
        raise GenerationError("there is no file to load", "/load FILE")
    path = Path(_expanded(name))
    with raised_interrupts():
        chat = Chat.open(path, talk.chat.loaded, **talk.given)
    talk.take(chat, path)


def _undo(talk: Talk, _: str) -> None:
    turn = talk.chat.undo()
    talk.autosave.keep(talk.chat)
    say(f"forgotten: {_beginning(turn.question)}")


def _retry(talk: Talk, _: str) -> None:
    talk.answer(lambda on_prefill: talk.chat.retry(on_prefill=on_prefill))


def _edit(talk: Talk, text: str) -> None:
    questions = [message.content for message in talk.chat.messages if message.role == "user"]
    if not questions:
        raise GenerationError("there is no message yet", "a message first")
    if text:
        talk.edit(without_block(text))
    elif talk.interactive:
        talk.draft, talk.editing = typed(questions[-1]), True
    else:
        raise GenerationError("there is no terminal to edit in", "/edit TEXT")


def _branch(talk: Talk, name: str) -> None:
    chat = talk.chat
    if not name:
        for branch, turns in chat.branches.items():
            tell(f"{'*' if branch == chat.branch_name else ' '} {branch}: {turns} {'turn' if turns == 1 else 'turns'}")
        say("/branch NAME begins another one here, or goes back to one")
        return
    if name in chat.branches:
        chat.switch(name)
        last = chat.messages[-1].content if chat.branches[name] else ""
        say(f"in branch {name}" + (f", after: {_beginning(last)}" if last else ""))
    else:
        chat.branch(name)
        say(f"in a new branch, {name}; /branch lists them")
    talk.autosave.keep(chat)


def _reset(talk: Talk, _: str) -> None:
    kept = talk.autosave.path if talk.chat.branches != {talk.chat.branch_name: 0} else None
    talk.chat.reset()
    talk.autosave.begin()
    say("the conversation is forgotten" + (f"; /load {kept} brings it back" if kept else ""))


def _tokens(talk: Talk, _: str) -> None:
    chat = talk.chat
    counts = chat.token_counts()
    first_seen = chat.dropped + bool(chat.system)
    for i, (message, count) in enumerate(zip(chat.messages, counts, strict=True)):
        gone = "  (dropped: the model no longer sees it)" if bool(chat.system) <= i < first_seen else ""
        tell(f"{count:7}  {message.role:9}  {_beginning(message.content)}{gone}")
    tell(f"{sum(counts):7}  in all; with what the template adds, {chat.context_used} of {chat.context_size} are taken")


def _stats(talk: Talk, _: str) -> None:
    for line in statistics.full(talk.chat, talk.moved):
        tell(line)


def _exit(talk: Talk, _: str) -> None:
    talk.leaving = True


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _expanded(name: str) -> str:
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    return str(Path(name[1:-1] if quoted else name).expanduser())


def _models(_: Talk) -> list[str]:
    """Paths, and the hub's models that were downloaded."""
    folders = platform.model_cache().glob("models--*--*")
    return [PATHS, *("/".join(folder.name.split("--")[1:]) for folder in folders)]


def _words(*words: str) -> Callable[[Talk], tuple[str, ...]]:
    return lambda talk: words


def _of_settings(talk: Talk) -> list[str]:
    own = [f"{name} {value}" for name, values in settings.OWN.items() for value in values]
    return [*(f"{name} " for name in settings.NAMES), *own]


def _names(_: Talk) -> list[str]:
    return [name.lstrip("/") for name in COMMANDS]


def _branches(talk: Talk) -> list[str]:
    return list(talk.chat.branches)


_ALL = (
    Command("/help [COMMAND]", "show the commands (also /?)", _help, _names),
    Command("/system [TEXT]", "show the system prompt, or set it (none: no prompt)", _system, _words("none")),
    Command("/set [NAME [VALUE]]", "show the settings, or set one", _set, _of_settings),
    Command("/show [WHAT]", f"show {', '.join(_SHOWN)}", _show, _words(*_SHOWN)),
    Command("/model [MODEL]", "go on with another model", _model, _models),
    Command("/save [FILE] [--cache]", "keep the conversation in a file (and what was computed)", _save, _words(PATHS)),
    Command("/load FILE", "go on with a saved conversation", _load, _words(PATHS)),
    Command("/undo", "forget the last message and its answer", _undo),
    Command("/retry", "answer the last message again", _retry),
    Command("/edit [TEXT]", "change the last message, and answer that", _edit),
    Command("/branch [NAME]", "list the branches, or go on in another or new one", _branch, _branches),
    Command("/reset", "forget all but the system prompt (also /clear)", _reset),
    Command("/tokens", "count the tokens of each message", _tokens),
    Command("/stats", "tokens, speed, and how far from this machine's limit", _stats),
    Command("/exit", "leave the chat (also /bye, /quit, Ctrl-D)", _exit),
)
COMMANDS = {command.usage.split()[0]: command for command in _ALL}
ALIASES = {"/?": "/help", "/clear": "/reset", "/bye": "/exit", "/quit": "/exit"}
