"""The commands of a chat, which start with a slash."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxlm.backend import bandwidth
from mlxlm.chat.reasoning import split
from mlxlm.chat.terminal import settings, statistics
from mlxlm.chat.terminal.interrupts import raise_interrupts
from mlxlm.chat.terminal.multiline import quote_message, strip_block
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.screen import open_screen, push_text
from mlxlm.chat.terminal.session_commands import expanded, load, save, sessions
from mlxlm.chat.terminal.settings import resolve_abbreviation
from mlxlm.chat.terminal.statistics import memory_bandwidth
from mlxlm.checkpoint.catalog import model_names
from mlxlm.checkpoint.local_models import hub_ids
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.chat.terminal.repl import Repl

_SHOW_TOPICS = ("model", "system", "settings", "messages", "session")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        usage: Name and arguments.
        help: What it does.
        run: Called with the Repl and the argument.
        complete: Returns possible arguments; `PATHS` stands for file names.
    """

    usage: str
    help: str
    run: Callable[[Repl, str], None]
    complete: Callable[[Repl], Iterable[str]] = lambda repl: ()


PATHS = "\0paths"


def run_command(repl: Repl, line: str) -> None:
    """Run a line that starts with a slash. Raise MlxlmError if that fails."""
    name, _, argument = line.strip().partition(" ")
    find_command(name).run(repl, argument.strip())


def find_command(name: str) -> Command:
    """Return the command with this name, alias or abbreviation.

    Aliases can't be abbreviated: a typing error in /clear would delete the conversation.

    Raises:
        GenerationError: None or several match.
    """
    match = name if name in ALIASES else resolve_abbreviation(name, COMMANDS) if name != "/" else None
    if match is None:
        near, *_ = [*difflib.get_close_matches(name, COMMANDS, 1), "/help"]
        raise GenerationError(f"there is no command {name}", f"{near}; to send a message that starts with /, type //")
    return COMMANDS[ALIASES.get(match, match)]


def _help(repl: Repl, name: str) -> None:
    selected = [find_command("/" + name.lstrip("/"))] if name else COMMANDS.values()
    width = max(len(c.usage) for c in selected)
    for command in selected:
        print_info(f"{command.usage:{width}}  {command.help}")
    if not name:
        print_info(_KEYS)


_KEYS = '''
Enter      sends; Alt-Enter starts a new line
"""        opens and closes a message of several lines
Ctrl-G     opens an editor, $VISUAL or $EDITOR (also Ctrl-X Ctrl-E)
Tab        completes
Ctrl-C     stops an answer; Ctrl-D leaves
//         starts a message that starts with /
/und       commands and settings may be abbreviated: /set temp 0.5
13% >      how full the context is'''


def _system(repl: Repl, text: str) -> None:
    if text:
        repl.chat.system_prompt = None if text == "none" else strip_block(text)
        repl.autosave.save_changes(repl.chat)
    prompt = repl.chat.system_prompt
    print_status(f"system prompt: {prompt}" if prompt else "there is no system prompt")


def _set(repl: Repl, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name and settings.setting_name(name), value.strip()
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
    topic = resolve_abbreviation(what, _SHOW_TOPICS) if what else ""
    if topic is None:
        raise GenerationError(f"/show {what}: unknown", ", ".join(_SHOW_TOPICS))
    if show := {"settings": _set, "system": _system}.get(topic):
        show(repl, "")
    elif topic == "messages":
        _show_messages(repl)
    chat, rows = repl.chat, {}
    if topic in ("", "model"):
        weights = bandwidth.weight_bytes(chat.lm.model)
        rows["model"] = str(chat.lm.path)
        rows["chat_template"] = chat.chat_template
        rows["read per token"] = "?" if weights is None else f"{human_bytes(weights)} of weights"
        rows["context"] = f"{chat.context_used} of {chat.context_size} tokens"
    if topic in ("", "session"):
        rows["branch"] = f"{chat.branch_name}, of {', '.join(chat.branches)}"
        rows["saved in"] = str(repl.autosave.path or "no file yet")
    for name, value in rows.items():
        print_info(f"{name:15} {value}")


def _show_messages(repl: Repl) -> None:
    """Print the messages; in a terminal, answers look as they did when they were generated."""
    for message in repl.chat.messages:
        print_status(f"{message.role}:")
        if message.role != "assistant" or not sys.stdout.isatty():
            print_info(message.content)
            continue
        screen = open_screen(repl.settings.reasoning, repl.settings.has_markdown(repl.chat))
        push_text(screen, split(message.content)[1] if repl.settings.reasoning == "hide" else message.content)
        screen.finish()


def _model(repl: Repl, name: str) -> None:
    if not name:
        _show(repl, "model")
        return
    with raise_interrupts():
        lm = repl.load(expanded(name) if name.startswith("~") else name)
    repl.chat.lm = lm
    repl.bytes_per_token = ""
    repl.autosave.save_changes(repl.chat)
    print_status("the conversation continues with this model, which reads it again")


def _undo(repl: Repl, _: str) -> None:
    turn = repl.chat.undo()
    repl.autosave.save_changes(repl.chat)
    print_status(f"removed: {_abbreviated(turn.question)}")


def _retry(repl: Repl, _: str) -> None:
    repl.answer(repl.chat.retry)


def _edit(repl: Repl, text: str) -> None:
    questions = [message.content for message in repl.chat.messages if message.role == "user"]
    if not questions:
        raise GenerationError("there is no message yet", "a message first")
    if text:
        repl.send(strip_block(text), "edit")
    elif repl.interactive:
        repl.draft, repl.purpose = quote_message(questions[-1]), "edit"
    else:
        raise GenerationError("there is no terminal to edit in", "/edit TEXT")


def _continue(repl: Repl, text: str) -> None:
    messages = repl.chat.messages
    if not messages or messages[-1].role != "assistant":
        raise GenerationError("there is no answer yet", "a message first")
    answer = strip_block(text) or messages[-1].content
    if not answer:
        raise GenerationError("the answer is empty", "/retry, or /continue TEXT")
    if repl.interactive and not text:
        repl.draft, repl.purpose = quote_message(answer), "continue"
        print_status("change the answer; Enter continues it, Ctrl-C leaves it as it was")
    else:
        repl.send(answer, "continue")


def _branch(repl: Repl, name: str) -> None:
    chat = repl.chat
    if not name:
        for branch, turns in chat.branches.items():
            mark, unit = "*" if branch == chat.branch_name else " ", "turn" if turns == 1 else "turns"
            print_info(f"{mark} {branch}: {turns} {unit}")
        print_status("/branch NAME starts a new branch here, or switches to an existing one")
        return
    if name in chat.branches:
        chat.switch(name)
        last = chat.messages[-1].content if chat.branches[name] else ""
        print_status(f"in branch {name}" + (f", after: {_abbreviated(last)}" if last else ""))
    else:
        chat.branch(name)
        print_status(f"in a new branch, {name}; /branch lists them")
    repl.autosave.save_changes(chat)


def _reset(repl: Repl, _: str) -> None:
    saved = repl.autosave.path if repl.chat.branches != {repl.chat.branch_name: 0} else None
    repl.chat.reset()
    repl.autosave.forget()
    print_status("the conversation is removed" + (f"; /load {saved} brings it back" if saved else ""))


def _tokens(repl: Repl, _: str) -> None:
    chat = repl.chat
    counts = chat.token_counts()
    first_seen = chat.dropped + bool(chat.system_prompt)
    for i, (message, count) in enumerate(zip(chat.messages, counts, strict=True)):
        dropped = "  (dropped: the model no longer sees it)" if bool(chat.system_prompt) <= i < first_seen else ""
        print_info(f"{count:7}  {message.role:9}  {_abbreviated(message.content)}{dropped}")
    print_info(f"{sum(counts):7}  in all; with the template, {chat.context_used} of {chat.context_size} are used")


def _stats(repl: Repl, _: str) -> None:
    for line in statistics.report_lines(repl.chat, repl.bytes_per_token):
        print_info(line)


def _exit(repl: Repl, _: str) -> None:
    repl.leaving = True


def _abbreviated(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _models(_: Repl) -> list[str]:
    """File names, names of the catalog, and models downloaded from the hub."""
    return [PATHS, *model_names(), *hub_ids()]


def _words(*words: str) -> Callable[[Repl], tuple[str, ...]]:
    return lambda repl: words


def _setting_values(repl: Repl) -> list[str]:
    choices = [f"{name} {value}" for name, values in settings.CHAT_SETTINGS.items() for value in values]
    return [*(f"{name} " for name in settings.NAMES), *choices]


_ALL = (
    Command("/help [COMMAND]", "show the commands (also /?)", _help, lambda repl: [name[1:] for name in COMMANDS]),
    Command("/system [TEXT]", "show the system prompt, or set it (none: no prompt)", _system, _words("none")),
    Command("/set [NAME [VALUE]]", "show the settings, or set one", _set, _setting_values),
    Command("/show [WHAT]", f"show {', '.join(_SHOW_TOPICS)}", _show, _words(*_SHOW_TOPICS)),
    Command("/model [MODEL]", "continue with another model", _model, _models),
    Command("/save [FILE] [--save-kv-cache]", "save the conversation (and its cache)", save, _words(PATHS)),
    Command("/load FILE", "continue a saved conversation", load, _words(PATHS)),
    Command("/sessions", "search the saved conversations, and continue one", sessions),
    Command("/undo", "remove the last message and its answer", _undo),
    Command("/retry", "answer the last message again", _retry),
    Command("/edit [TEXT]", "change the last message and answer it again", _edit),
    Command("/continue [TEXT]", "change the last answer and let the model continue it", _continue),
    Command("/branch [NAME]", "list the branches, or switch to one or start one", _branch, lambda r: r.chat.branches),
    Command("/reset", "remove all but the system prompt (also /clear)", _reset),
    Command("/tokens", "count the tokens of each message", _tokens),
    Command("/stats", "show tokens, speed, and memory bandwidth", _stats),
    Command("/exit", "leave the chat (also /bye, /quit, Ctrl-D)", _exit),
)
COMMANDS: dict[str, Command] = {command.usage.split()[0]: command for command in _ALL}
ALIASES = {"/?": "/help", "/clear": "/reset", "/bye": "/exit", "/quit": "/exit"}
