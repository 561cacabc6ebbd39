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
from mlxlm.chat.terminal.abbreviations import resolve_abbreviation
from mlxlm.chat.terminal.multiline import quote_message, strip_block
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.screen import open_screen
from mlxlm.chat.terminal.statistics import memory_bandwidth
from mlxlm.chat.terminal.stream_answer import raise_interrupts
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.chat.terminal.repl import Repl

_SHOW_TOPICS = ("model", "system", "settings", "messages", "session")


@dataclass(frozen=True)
class Command:
    """`run(talk, argument)`; `complete(talk)` has the words that can be the argument, PATHS for names of files."""

    usage: str
    help: str
    run: Callable[[Repl, str], None]
    complete: Callable[[Repl], Iterable[str]] = lambda repl: ()


COMPLETE_PATHS = "\0paths"


def run_command(repl: Repl, line: str) -> None:
    """Do what a line that begins with a slash says. Raises MlxlmError if it can't be done."""
    name, _, argument = line.strip().partition(" ")
    named(name).run(repl, argument.strip())


def named(name: str) -> Command:
    """The command that a word with a slash is or abbreviates. Raises GenerationError if there is none or several.
    Aliases can't be abbreviated: a typing error would forget the conversation."""
    found = name if name in ALIASES else resolve_abbreviation(name, COMMANDS) if name != "/" else None
    if found is None:
        near = difflib.get_close_matches(name, COMMANDS, 1) or ["/help"]
        raise GenerationError(
            f"there is no command {name}", f"{near[0]}; a message that begins with / is typed with //"
        )
    return COMMANDS[ALIASES.get(found, found)]


def _help(repl: Repl, name: str) -> None:
    chosen = [named("/" + name.lstrip("/"))] if name else COMMANDS.values()
    width = max(len(c.usage) for c in chosen)
    for command in chosen:
        print_info(f"{command.usage:{width}}  {command.help}")
    if not name:
        print_info(_KEYS)


_KEYS = '''
Enter      sends; Alt-Enter begins a new line
"""        opens and closes a message of several lines
Ctrl-G     opens an editor, $VISUAL or $EDITOR (also Ctrl-X Ctrl-E)
Tab        completes
Ctrl-C     stops an answer; Ctrl-D leaves
//         begins a message that begins with /
/und       commands and settings may be shortened: /set temp 0.5
13% >      so full is the context'''


def _system(repl: Repl, text: str) -> None:
    if text:
        repl.chat.system_prompt = None if text == "none" else strip_block(text)
        repl.autosave.save_changes(repl.chat)
    print_status(
        f"system prompt: {repl.chat.system_prompt}" if repl.chat.system_prompt else "there is no system prompt"
    )


def _set(repl: Repl, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name and settings.named(name), value.strip()
    if value:
        if not repl.interactive and (name, value) == ("context_overflow", "ask"):
            raise GenerationError("context_overflow ask requires a terminal", "stop or drop")
        if not sys.stdout.isatty() and (name, value) == ("markdown", "on"):
            raise GenerationError("markdown on requires a terminal", "off or auto")
        settings.set_setting(repl.settings, repl.chat, name, value)
        if (name, value) == ("stats", "on"):
            memory_bandwidth()
        repl.autosave.save_changes(repl.chat)
    settings_text = settings.settings_text(repl.settings, repl.chat)
    for key in [name] if name else settings_text:
        print_info(f"{key:18} {settings_text[key]}")


def _show(repl: Repl, what: str) -> None:
    if what:
        if (found := resolve_abbreviation(what, _SHOW_TOPICS)) is None:
            raise GenerationError(f"there is nothing called {what} to show", ", ".join(_SHOW_TOPICS))
        what = found
    chat = repl.chat
    if what == "settings":
        return _set(repl, "")
    if what == "system":
        return _system(repl, "")
    if what == "messages":
        return _show_messages(repl)
    rows = {}
    if what in ("", "model"):
        weights = bandwidth.weight_bytes(chat.lm.model)
        rows["model"] = str(chat.lm.path)
        rows["chat_template"] = chat.chat_template
        rows["read per token"] = "?" if weights is None else f"{human_bytes(weights)} of weights"
        rows["context"] = f"{chat.context_used} of {chat.context_size} tokens"
    if what in ("", "session"):
        rows["branch"] = f"{chat.branch_name}, of {', '.join(chat.branches)}"
        rows["kept in"] = str(repl.autosave.path or "no file yet")
    for name, value in rows.items():
        print_info(f"{name:15} {value}")
    return None


def _show_messages(repl: Repl) -> None:
    """In a terminal the answers look as they did when they came, but for hidden reasoning, which isn't counted."""
    for message in repl.chat.messages:
        print_status(f"{message.role}:")
        if message.role != "assistant" or not sys.stdout.isatty():
            print_info(message.content)
            continue
        screen = open_screen(repl.settings.reasoning, repl.settings.has_markdown(repl.chat))
        thought, answer = split(message.content)
        if repl.settings.reasoning != "hide":
            screen.push(thought, True)
        screen.push(answer, False)
        screen.finish()


def _model(repl: Repl, name: str) -> None:
    if not name:
        return _show(repl, "model")
    with raise_interrupts():
        lm = repl.load(_expanded(name) if name.startswith("~") else name)
    repl.chat.lm = lm
    repl.bytes_per_token = None
    repl.autosave.save_changes(repl.chat)
    print_status("the conversation goes on with this model, which reads it anew")
    return None


def _save(repl: Repl, text: str) -> None:
    """The file is the chat's from now on: every answer is added to it."""
    name = text.removesuffix("--save-kv-cache").strip()
    if not name and not repl.autosave.named:
        raise GenerationError("there is no file yet to save to", "/save FILE")
    path = Path(_expanded(name)) if name else repl.autosave.path
    repl.autosave.save(repl.chat, path, cache=text.endswith("--save-kv-cache"))
    repl.autosave.name(path, cached=text.endswith("--save-kv-cache"))
    print_status(f"saved to {path}; what is said from now on is added to it")


def _load(repl: Repl, name: str) -> None:
    if not name:
        raise GenerationError("there is no file to load", "/load FILE")
    path = Path(_expanded(name))
    with raise_interrupts():
        chat = Chat.open(path, repl.chat.lm, **repl.given)
    repl.take(chat, path)


def _undo(repl: Repl, _: str) -> None:
    turn = repl.chat.undo()
    repl.autosave.save_changes(repl.chat)
    print_status(f"forgotten: {_beginning(turn.question)}")


def _retry(repl: Repl, _: str) -> None:
    repl.answer(lambda on_prefill: repl.chat.retry(on_prefill=on_prefill))


def _edit(repl: Repl, text: str) -> None:
    questions = [message.content for message in repl.chat.messages if message.role == "user"]
    if not questions:
        raise GenerationError("there is no message yet", "a message first")
    if text:
        repl.edit(strip_block(text))
    elif repl.interactive:
        repl.draft, repl.editing = quote_message(questions[-1]), True
    else:
        raise GenerationError("there is no terminal to edit in", "/edit TEXT")


def _branch(repl: Repl, name: str) -> None:
    chat = repl.chat
    if not name:
        for branch, turns in chat.branches.items():
            print_info(
                f"{'*' if branch == chat.branch_name else ' '} {branch}: {turns} {'turn' if turns == 1 else 'turns'}"
            )
        print_status("/branch NAME begins another one here, or goes back to one")
        return
    if name in chat.branches:
        chat.switch(name)
        last = chat.messages[-1].content if chat.branches[name] else ""
        print_status(f"in branch {name}" + (f", after: {_beginning(last)}" if last else ""))
    else:
        chat.branch(name)
        print_status(f"in a new branch, {name}; /branch lists them")
    repl.autosave.save_changes(chat)


def _reset(repl: Repl, _: str) -> None:
    kept = repl.autosave.path if repl.chat.branches != {repl.chat.branch_name: 0} else None
    repl.chat.reset()
    repl.autosave.begin()
    print_status("the conversation is forgotten" + (f"; /load {kept} brings it back" if kept else ""))


def _tokens(repl: Repl, _: str) -> None:
    chat = repl.chat
    counts = chat.token_counts()
    first_seen = chat.dropped + bool(chat.system_prompt)
    for i, (message, count) in enumerate(zip(chat.messages, counts, strict=True)):
        gone = "  (dropped: the model no longer sees it)" if bool(chat.system_prompt) <= i < first_seen else ""
        print_info(f"{count:7}  {message.role:9}  {_beginning(message.content)}{gone}")
    print_info(
        f"{sum(counts):7}  in all; with what the template adds, {chat.context_used} of {chat.context_size} are taken"
    )


def _stats(repl: Repl, _: str) -> None:
    for line in statistics.report_lines(repl.chat, repl.bytes_per_token):
        print_info(line)


def _exit(repl: Repl, _: str) -> None:
    repl.leaving = True


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _expanded(name: str) -> str:
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    return str(Path(name[1:-1] if quoted else name).expanduser())


def _models(_: Repl) -> list[str]:
    """Paths, and the hub's models that were downloaded."""
    folders = platform.model_cache().glob("models--*--*")
    return [COMPLETE_PATHS, *("/".join(folder.name.split("--")[1:]) for folder in folders)]


def _words(*words: str) -> Callable[[Repl], tuple[str, ...]]:
    return lambda repl: words


def _of_settings(repl: Repl) -> list[str]:
    own = [f"{name} {value}" for name, values in settings.CHAT_SETTINGS.items() for value in values]
    return [*(f"{name} " for name in settings.NAMES), *own]


def _names(_: Repl) -> list[str]:
    return [name.lstrip("/") for name in COMMANDS]


def _branches(repl: Repl) -> list[str]:
    return list(repl.chat.branches)


_ALL = (
    Command("/help [COMMAND]", "show the commands (also /?)", _help, _names),
    Command("/system [TEXT]", "show the system prompt, or set it (none: no prompt)", _system, _words("none")),
    Command("/set [NAME [VALUE]]", "show the settings, or set one", _set, _of_settings),
    Command("/show [WHAT]", f"show {', '.join(_SHOW_TOPICS)}", _show, _words(*_SHOW_TOPICS)),
    Command("/model [MODEL]", "go on with another model", _model, _models),
    Command(
        "/save [FILE] [--save-kv-cache]",
        "keep the conversation in a file (and what was computed)",
        _save,
        _words(COMPLETE_PATHS),
    ),
    Command("/load FILE", "go on with a saved conversation", _load, _words(COMPLETE_PATHS)),
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
