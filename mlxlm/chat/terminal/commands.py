"""The commands of a chat, which start with a slash."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxlm.backend import bandwidth
from mlxlm.chat.files import name_files, read_file, split_files
from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import split
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import about, clipboard, settings, system_prompts
from mlxlm.chat.terminal.about import memory_bandwidth, model_name
from mlxlm.chat.terminal.autosave import is_model_here
from mlxlm.chat.terminal.mentions import unescape
from mlxlm.chat.terminal.multiline import quote_message, strip_block
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.screen import open_screen, push_text
from mlxlm.chat.terminal.settings import resolve_abbreviation
from mlxlm.chat.terminal.terminal_chat import TerminalChat, raise_interrupts
from mlxlm.chat.terminal.tools import call_text, show_result
from mlxlm.checkpoint.catalog import model_names
from mlxlm.checkpoint.local_models import hub_ids
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.files import atomic_new_file
from mlxlm.utils.formatting import human_bytes

_MAX_SHOWN_LINES = 5  # of the question when a conversation is continued
_SHOW_TOPICS = ("model", "system", "settings", "messages", "session")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        usage: Name and arguments.
        help: What it does.
        run: Called with the TerminalChat and the argument.
        complete: Returns possible arguments; `PATHS` stands for file names.
    """

    usage: str
    help: str
    run: Callable[[TerminalChat, str], None]
    complete: Callable[[TerminalChat], Iterable[str]] = lambda terminal: ()


PATHS = "\0paths"


def run_command(terminal: TerminalChat, line: str) -> None:
    """Run a line that starts with a slash. Raise MlxlmError if that fails."""
    name, _, argument = line.strip().partition(" ")
    find_command(name).run(terminal, argument.strip())


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


def _help(terminal: TerminalChat, name: str) -> None:
    if not name:
        _print_commands(command for name, command in COMMANDS.items() if name not in _UNCOMMON)
        print_info(_KEYS + f"\n/help {', '.join(_TOPICS)}: more")
    elif name in _TOPICS:
        commands = _BY_TOPIC.get(name, ())
        _print_commands(commands)
        print_info("\n" * bool(commands) + _TOPICS[name])
    else:
        _print_commands([find_command("/" + name.lstrip("/"))])


def _print_commands(commands: Iterable[Command]) -> None:
    commands = list(commands)
    width = max((len(command.usage) for command in commands), default=0)
    for command in commands:
        print_info(f"{command.usage:{width}}  {command.help}")


_KEYS = """
Enter       sends; Alt-Enter starts a new line
@FILE       adds a file to a message; Tab completes
Ctrl-C      stops an answer; Ctrl-D leaves
13% >       how full the context is"""
_UNCOMMON = ("/show", "/stats", "/continue", "/save", "/branch", "/tokens", "/tools")  # only /help TOPIC lists them
# Each has the commands with this topic, and a text.
_TOPICS = {
    "model": """\
Settings can be abbreviated: /set temp 0.5. /set temp default restores the default.
/system none removes the system prompt, and /system save NAME saves it; /system @NAME and
mlxlm chat --system @NAME use a saved one.""",
    "files": """\
@notes.txt  adds the file to the message; also @"my notes.txt" and @~/notes.txt
-f FILE     adds a file to the first message: mlxlm chat -f notes.txt -p "Summarize"
/file none  removes the files of the next message
Files can be text in UTF-8, HTML (without its markup) and PDF (with pip install pypdf).""",
    "answers": "Ctrl-C stops an answer. /edit keeps the files of the message.",
    "sessions": """\
Conversations in a terminal are saved automatically: mlxlm chat --continue opens the last one.""",
    "tools": """\
--tools FILE.py   the functions of a Python file: mlxlm chat --tools weather.py
--mcp COMMAND     the tools of an MCP server: mlxlm chat --mcp "npx some-server"
Before each call: y runs it, a runs all calls of this function, anything else refuses it.
Ctrl-C stops a running call.""",
    "keys": '''\
Enter       sends; Alt-Enter starts a new line
"""         starts and ends a message of several lines
Ctrl-G      opens an editor, $VISUAL or $EDITOR (also Ctrl-X Ctrl-E)
Tab         completes commands, settings and files
Up, Down    earlier messages
Ctrl-C      stops an answer; Ctrl-D leaves
//          sends a message that starts with /
/und        commands can be abbreviated''',
}


def _system(terminal: TerminalChat, text: str) -> None:
    words = text.split()
    if words[:1] == ["save"] and len(words) == 2:
        if not terminal.chat.system_prompt:
            raise GenerationError("there is no system prompt to save", "/system TEXT")
        path = system_prompts.save(words[1], terminal.chat.system_prompt)
        print_status(f"saved in {path}; /system @{path.stem} uses it")
        return
    if text:
        terminal.chat.system_prompt = None if text == "none" else strip_block(system_prompts.resolve(text))
        terminal.autosave.save_changes(terminal.chat)
    prompt = terminal.chat.system_prompt
    print_status(f"system prompt: {prompt}" if prompt else "there is no system prompt")
    if not text and (names := system_prompts.saved_names()):
        print_status(f"saved: {', '.join(f'@{name}' for name in names)}")


def _set(terminal: TerminalChat, text: str) -> None:
    name, _, value = text.partition(" ")
    name, value = name and settings.setting_name(name), value.strip()
    if value:
        if not terminal.interactive and (name, value) == ("context_overflow", "ask"):
            raise GenerationError("context_overflow ask requires a terminal", "stop or drop")
        if not sys.stdout.isatty() and (name, value) == ("markdown", "on"):
            raise GenerationError("markdown on requires a terminal", "off or auto")
        settings.set_setting(terminal.settings, terminal.chat, name, value)
        if (name, value) == ("stats", "on"):
            memory_bandwidth()
        terminal.autosave.save_changes(terminal.chat)
    settings_text = settings.settings_text(terminal.settings, terminal.chat)
    width = len(name) if name else max(map(len, settings_text))
    for key in [name] if name else settings_text:
        print_info(f"{key:{width}}  {settings_text[key]}")


def _show(terminal: TerminalChat, what: str) -> None:
    topic = resolve_abbreviation(what, _SHOW_TOPICS) if what else ""
    if topic is None:
        raise GenerationError(f"/show {what}: unknown", ", ".join(_SHOW_TOPICS))
    if show := {"settings": _set, "system": _system}.get(topic):
        show(terminal, "")
    elif topic == "messages":
        _show_messages(terminal, terminal.chat.messages)
    chat, rows = terminal.chat, {}
    if topic in ("", "model"):
        weights = bandwidth.weight_bytes(chat.lm.model)
        rows["model"] = str(chat.lm.path)
        rows["chat_template"] = chat.chat_template
        rows["read per token"] = "?" if weights is None else f"{human_bytes(weights)} of weights"
        rows["context"] = f"{chat.context_used or 'empty: 0'} of {chat.context_size} tokens"
    if topic in ("", "session"):
        rows["branch"] = chat.branch_name + (f" of {', '.join(chat.branches)}" if len(chat.branches) > 1 else "")
        rows["saved in"] = str(terminal.autosave.path or "no file yet")
    for name, value in rows.items():
        print_info(f"{name:15} {value}")


def _show_messages(terminal: TerminalChat, messages: Sequence[Message]) -> None:
    """Print messages; in a terminal, answers look as they did when they were generated."""
    if not messages:
        print_status("empty: there is no message yet")
    for message in messages:
        if message.role == "tool":
            show_result(message.content)
            continue
        print_status(f"{message.role}:")
        for call in message.tool_calls:
            print_info(call_text(call))
        if message.role != "assistant" or not sys.stdout.isatty():
            print_info(message.content)
            continue
        screen = open_screen(terminal.settings.reasoning, terminal.settings.has_markdown(terminal.chat))
        push_text(screen, split(message.content)[1] if terminal.settings.reasoning == "hide" else message.content)
        screen.finish()


def show_last_exchange(terminal: TerminalChat) -> None:
    """Print the end of the last question, without the text of files, and its answer, if there is one."""
    chat = terminal.chat
    if chat.branches[chat.branch_name]:
        messages = chat.messages
        start = max(index for index, message in enumerate(messages) if message.role == "user")
        question, *answer = messages[start:]
        lines = name_files(question.content).splitlines()
        shown = "\n".join(lines if len(lines) <= _MAX_SHOWN_LINES else ["…", *lines[-_MAX_SHOWN_LINES:]])
        _show_messages(terminal, [replace(question, content=shown), *answer])


def _model(terminal: TerminalChat, name: str) -> None:
    if not name:
        _show(terminal, "model")
        return
    with raise_interrupts():
        lm = terminal.load(_expanded(name) if name.startswith("~") else name)
    terminal.chat.lm = lm
    terminal.bytes_per_token = ""
    terminal.autosave.save_changes(terminal.chat)
    print_status("the conversation continues with this model")


def _save(terminal: TerminalChat, text: str) -> None:
    """Save the chat to a file, to which every new answer is added."""
    name, cached = text.removesuffix("--save-kv-cache").strip(), text.endswith("--save-kv-cache")
    path = Path(_expanded(name)) if name else terminal.autosave.path if terminal.autosave.named else None
    if path is None:
        raise GenerationError("there is no file yet to save to", "/save FILE")
    terminal.autosave.save(terminal.chat, path, cached)
    terminal.autosave.set_path(path, cached)
    print_status(f"saved to {path}; new messages are added to it")


def _export(terminal: TerminalChat, name: str) -> None:
    """Write the conversation to a new Markdown file."""
    if not name:
        raise GenerationError("/export needs the name of a file", "/export chat.md")
    if not terminal.last_question:
        raise GenerationError("there is no message yet", "a message first")
    path, chat = Path(_expanded(name)), terminal.chat
    parts = [f"# Chat with {model_name(chat.lm)}"]
    for message in chat.messages:
        reasoning, text = split(message.content) if message.role == "assistant" else ("", message.content)
        parts.append(f"## {message.role.capitalize()}")
        if reasoning:
            parts.append(f"<details><summary>Reasoning</summary>\n\n{reasoning}\n\n</details>")
        parts += filter(None, [text, *(f"`{call_text(call)}`" for call in message.tool_calls)])
    with atomic_new_file(path, GenerationError, "another name") as file:
        file.write(("\n\n".join(parts) + "\n").encode())
    print_status(f"wrote {len(chat.messages)} messages to {path}")


def _copy(terminal: TerminalChat, number: str) -> None:
    """Copy the last answer, or one of its blocks of code."""
    answer = split(_last_answer(terminal))[1]
    if number:
        from markdown_it import MarkdownIt  # takes time to import

        tokens = MarkdownIt("commonmark").parse(answer)
        blocks = [token.content for token in tokens if token.type in ("fence", "code_block")]
        if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
            hint = f"/copy 1 to /copy {len(blocks)}" if len(blocks) > 1 else "/copy 1" if blocks else "/copy"
            raise GenerationError(f"the last answer has no code block {number}", hint)
        answer = blocks[int(number) - 1]
    print_status(f"copied {len(answer):,} characters {clipboard.copy(answer)}")


def _last_answer(terminal: TerminalChat) -> str:
    messages = terminal.chat.messages
    if not messages or messages[-1].role != "assistant":
        raise GenerationError("there is no answer yet", "a message first")
    return messages[-1].content


def _file(terminal: TerminalChat, name: str) -> None:
    if name == "none":
        terminal.files = []
    elif name:
        terminal.add_file(read_file(_expanded(name)))
    names = ", ".join(file.name for file in terminal.files)
    print_status(f"files of the next message: {names or 'none'}")


def _tools(terminal: TerminalChat, _: str) -> None:
    for tool in terminal.chat.tools:
        print_info(f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})  {_abbreviated(tool.description)}")
    if not terminal.chat.tools:
        print_status("there are no tools (start mlxlm chat with --tools FILE.py or --mcp COMMAND)")


def _load(terminal: TerminalChat, name: str) -> None:
    """Continue the chat of a file, with the present model."""
    if not name:
        raise GenerationError("there is no file to load", "/load FILE")
    path = Path(_expanded(name))
    with raise_interrupts():
        chat = Chat.open(path, terminal.chat.lm, **terminal.chat_arguments)
    terminal.replace_chat(chat, path)
    show_last_exchange(terminal)


def _sessions(terminal: TerminalChat, _: str) -> None:
    """Let the user choose a chat of the private folder, and continue it with its model."""
    from mlxlm.chat.terminal.session_picker import choose_session  # prompt_toolkit takes time to import

    session = choose_session(terminal.autosave.path, terminal.run_application)
    if session is None or session.path == terminal.autosave.path:
        return
    lm = terminal.chat.lm
    if session.model != str(lm.path) and not is_model_here(session.model):
        problem = f"this is a chat with {session.model}, which isn't on this machine"
        raise GenerationError(problem, f"/load {session.path} to continue it with {model_name(lm)}")
    with raise_interrupts():
        lm = lm if session.model == str(lm.path) else terminal.load(session.model)
        chat = Chat.open(session.path, lm, **terminal.chat_arguments)
    terminal.autosave.save_changes(terminal.chat)
    terminal.replace_chat(chat, session.path, named=False)
    show_last_exchange(terminal)


def _expanded(name: str) -> str:
    """Return a path without quotes or backslashes, as terminals insert it, with ~ replaced by the home folder."""
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    return os.path.expanduser(name[1:-1] if quoted else unescape(name))


def _undo(terminal: TerminalChat, _: str) -> None:
    turn = terminal.chat.undo()
    terminal.autosave.save_changes(terminal.chat)
    print_status(f"removed: {_abbreviated(turn.question)}")


def _edit(terminal: TerminalChat, text: str) -> None:
    question = terminal.last_question
    if not question:
        raise GenerationError("there is no message yet", "a message first")
    if text:
        terminal.send(strip_block(text), "edit")
    elif terminal.interactive:
        terminal.draft, terminal.purpose = quote_message(split_files(question)[1]), "edit"
    else:
        raise GenerationError("there is no terminal to edit in", "/edit TEXT")


def _continue(terminal: TerminalChat, text: str) -> None:
    answer = strip_block(text) or _last_answer(terminal)
    if not answer:
        raise GenerationError("the answer is empty", "/retry, or /continue TEXT")
    if terminal.interactive and not text:
        terminal.draft, terminal.purpose = quote_message(answer), "continue"
        print_status("change the answer; Enter continues it, Ctrl-C leaves it as it was")
    else:
        terminal.send(answer, "continue")


def _branch(terminal: TerminalChat, name: str) -> None:
    chat = terminal.chat
    if not name:
        for branch, turns in chat.branches.items():
            mark, unit = "*" if branch == chat.branch_name else " ", "turn" if turns == 1 else "turns"
            print_info(f"{mark} {branch}: {turns} {unit}")
        print_status("/branch NAME starts a new branch here or switches to an existing one")
        return
    if name in chat.branches:
        chat.switch(name)
        last = chat.messages[-1].content if chat.branches[name] else ""
        print_status(f"in branch {name}" + (f", after: {_abbreviated(last)}" if last else ""))
    else:
        chat.branch(name)
        print_status(f"in a new branch, {name}; /branch lists them")
    terminal.autosave.save_changes(chat)


def _reset(terminal: TerminalChat, _: str) -> None:
    saved = terminal.autosave.path if terminal.chat.branches != {terminal.chat.branch_name: 0} else None
    terminal.chat.reset()
    terminal.autosave.open(None)
    print_status("the conversation is removed" + (f"; /load {saved} opens it again" if saved else ""))


def _tokens(terminal: TerminalChat, _: str) -> None:
    chat = terminal.chat
    counts = chat.token_counts()
    first_seen = chat.dropped + bool(chat.system_prompt)
    for i, (message, count) in enumerate(zip(chat.messages, counts, strict=True)):
        dropped = "  (dropped: the model no longer sees it)" if bool(chat.system_prompt) <= i < first_seen else ""
        print_info(f"{count:7}  {message.role:9}  {_abbreviated(message.content)}{dropped}")
    print_info(f"{sum(counts):7}  in total; with the template, {chat.context_used} of {chat.context_size} are used")


def _stats(terminal: TerminalChat, _: str) -> None:
    for line in about.report_lines(terminal.chat, terminal.bytes_per_token):
        print_info(line)


def _exit(terminal: TerminalChat, _: str) -> None:
    terminal.leaving = True


def _abbreviated(text: str) -> str:
    line = " ".join(name_files(text).split())
    return line if len(line) <= 60 else line[:59] + "…"


def _words(*words: str) -> Callable[[TerminalChat], tuple[str, ...]]:
    return lambda terminal: words


def _setting_values(terminal: TerminalChat) -> list[str]:
    choices = [f"{name} {value}" for name, values in settings.CHAT_SETTINGS.items() for value in values]
    return [*(f"{name} " for name in settings.NAMES), *choices]


def _help_names(_: TerminalChat) -> list[str]:
    return [*_TOPICS, *(name[1:] for name in COMMANDS)]


def _system_words(_: TerminalChat) -> list[str]:
    return ["none", "save ", *(f"@{name}" for name in system_prompts.saved_names())]


_BY_TOPIC = {
    "": (Command("/help [TOPIC]", "show this, or one topic (also /?)", _help, _help_names),),
    "model": (
        Command("/system [TEXT | @NAME]", "show or set the system prompt", _system, _system_words),
        Command("/set [NAME [VALUE]]", "show or change the settings", _set, _setting_values),
        Command("/show [WHAT]", f"show {', '.join(_SHOW_TOPICS)}", _show, _words(*_SHOW_TOPICS)),
        Command("/model [MODEL]", "continue with another model", _model, lambda _: [PATHS, *model_names(), *hub_ids()]),
        Command("/stats", "show tokens, speed, and memory bandwidth", _stats),
    ),
    "files": (Command("/file [PATH]", "add a file to the next message", _file, _words(PATHS, "none")),),
    "answers": (
        Command("/undo", "remove the last message and answer", _undo),
        Command("/retry", "answer the last message again", lambda terminal, _: terminal.answer(terminal.chat.retry)),
        Command("/edit [TEXT]", "edit the last message and resend it", _edit),
        Command("/continue [TEXT]", "edit the last answer and let the model continue it", _continue),
        Command("/copy [N]", "copy the last answer or a code block", _copy),
    ),
    "sessions": (
        Command(
            "/save [FILE] [--save-kv-cache]", "save the conversation (and its key-value cache)", _save, _words(PATHS)
        ),
        Command("/load FILE", "continue a saved conversation", _load, _words(PATHS)),
        Command("/sessions", "search the saved conversations", _sessions),
        Command("/export FILE.md", "write the conversation as Markdown", _export, _words(PATHS)),
        Command("/branch [NAME]", "list branches, switch to one, or start one", _branch, lambda r: r.chat.branches),
        Command("/reset", "remove all messages (also /clear)", _reset),
        Command("/tokens", "count the tokens of each message", _tokens),
    ),
    "tools": (Command("/tools", "list the functions that the model can call", _tools),),
    "keys": (Command("/exit", "leave (also /bye, /quit, Ctrl-D)", _exit),),
}
COMMANDS: dict[str, Command] = {command.usage.split()[0]: command for group in _BY_TOPIC.values() for command in group}
ALIASES = {"/?": "/help", "/clear": "/reset", "/bye": "/exit", "/quit": "/exit"}
