"""`mlxlm chat`: a conversation with a model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cache.options import KVOptions
from mlxlm.cli.distributed import hosts_option
from mlxlm.cli.generation_options import (
    Speculation,
    given_options,
    kv_options,
    load_model,
    sampling_options,
    speculation_options,
)
from mlxlm.cli.options import (
    MODEL,
    PATH,
    SectionedCommand,
    adapter_option,
    given_flags,
    given_values,
    is_given,
    offline_option,
    option,
    reject_unused_options,
)
from mlxlm.cli.render import spinner
from mlxlm.cli.stdin import prepend_stdin, read_stdin
from mlxlm.generation.options import GenerationOptions
from mlxlm.utils.errors import GenerationError, one_line

if TYPE_CHECKING:
    from mlxlm.chat.files import TextFile
    from mlxlm.chat.tools import CallableTool

_CHAT_TEMPLATE = "Chat template: chatml, llama3, plain, ... or a Jinja file.  [default: the model's]"
_CONTEXT_OVERFLOW = (
    "When the context is full: ask, stop, or drop the oldest turns.  [default: the session's, or ask in a terminal "
    "and stop elsewhere]"
)
_REASONING = "How to display reasoning. dim leaves it out if the output is not a terminal."
_EFFORT = "How much to reason, if the chat template knows it.  [default: the model's]"
_MARKDOWN = "Render Markdown.  [default: in a terminal, if there is a chat template]"
_YES = "Don't ask before running tools or, without MODEL, before downloading the default model."
_TOOLS = "Let the model call the functions in this file. Repeatable."
_MCP = "Let the model call the tools of this MCP server. Repeatable."
_FILE = "Add a file to the first message. Repeatable."
_SERVER = "With --prompt: send the message to this server instead of loading MODEL.  [env: MLXLM_SERVER]"
_SYSTEM_PROMPT = "System prompt, or @NAME for a saved one."
_MAX_TOKENS = "Generate at most N tokens per answer.  [default: unlimited; 256 without a chat template]"
_SAVE_KV_CACHE = "With --session: also save the key-value cache, so that the conversation opens at once."
_conversation = partial(option, "Conversation")
_session = partial(option, "Sessions")
_display = partial(option, "Display")


@click.command(cls=SectionedCommand, context_settings={"allow_extra_args": True})
@click.argument("model", required=False, type=MODEL)
@offline_option
@_conversation("-p --prompt", str, "Answer one message and exit; - reads stdin.", metavar="TEXT")
@_conversation("-f --file files", PATH, _FILE, metavar="FILE", multiple=True)
@adapter_option("Conversation", advanced=True)
@_conversation("--server", str, _SERVER, metavar="URL", envvar="MLXLM_SERVER", advanced=True)
@_conversation("--yes", bool, _YES, advanced=True)
@_conversation("--system --system-prompt system_prompt", str, _SYSTEM_PROMPT, metavar="TEXT")
@_conversation("--chat-template", str, _CHAT_TEMPLATE, metavar="NAME", advanced=True)
@_conversation("--context-overflow", ["ask", "stop", "drop"], _CONTEXT_OVERFLOW, advanced=True)
@_conversation("--reasoning-effort", ["none", "low", "medium", "high"], _EFFORT, advanced=True)
@_conversation("--tools", PATH, _TOOLS, metavar="FILE.py", multiple=True)
@_conversation("--mcp", str, _MCP, metavar="COMMAND", multiple=True)
@_session("--session", str, "Continue the conversation in FILE, or start it there.", metavar="FILE")
@_session("--continue continue_last", bool, "Continue the last saved conversation.")
@_session("--sessions", bool, "Search the saved conversations and continue one.")
@_session("--save-kv-cache", bool, _SAVE_KV_CACHE, advanced=True)
@_session("--private", bool, "Save neither the conversation nor the input history.")
@_display("--reasoning", ["show", "dim", "hide"], _REASONING, default="dim", advanced=True)
@_display("--markdown/--no-markdown", bool, _MARKDOWN, default=None, advanced=True)
@_display("-v --verbose", bool, "Print token counts and speed after each answer.")
@option("Stopping", "-n --max-tokens", click.IntRange(1), _MAX_TOKENS)
@sampling_options(without=["logprobs", "max_tokens"])
@kv_options
@speculation_options
@hosts_option
def chat(
    model: str | None,
    prompt: str | None,
    options: GenerationOptions,
    kv: KVOptions,
    speculation: Speculation,
    adapter: Path | None,
    **flags: Any,
) -> None:
    """Chat with MODEL: a name of mlxlm models, a folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    Ctrl-C stops an answer; /help lists the commands; @FILE adds a file.
    \f
    If input is piped, each line is a message (or each block between
    two \"\"\"), and the answers go to standard output. With --prompt, piped input comes first in that one message, then
    an empty line, then --prompt. A model without a chat template continues your text. A model's generation_config.json
    can set other sampling defaults.

    --tools runs a Python file and lets the model call its functions. --mcp starts an MCP server and lets the model call
    its tools (pip install 'mlxlm[mcp]'). You see each call and are asked before it runs.

    The last 50 conversations in a terminal are saved in a private folder: --continue opens the last one, --sessions
    searches them. If the output is not a terminal, --sessions prints a line for each, separated by tabs: date, model,
    number of messages, first question and file. With --session, --continue or --sessions you can leave out MODEL: the
    conversation names it.
    """  # noqa: D301 - click's form feed: --help ends there
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if words := click.get_current_context().args:
        raise click.UsageError(f"a message follows MODEL (try: -p {shlex.quote(' '.join(words))})")
    _check_flags(flags, prompt is not None, interactive)
    has_tools = bool(flags["tools"] or flags["mcp"])
    reject_unused_options(flags, (model is not None and not has_tools, ["yes"], "MODEL is given"))
    from mlxlm.chat.files import read_file
    from mlxlm.chat.terminal import autosave, system_prompts
    from mlxlm.chat.terminal.about import first_screen, memory_bandwidth
    from mlxlm.chat.terminal.mentions import mentioned_paths
    from mlxlm.chat.terminal.repl import open_repl
    from mlxlm.chat.terminal.settings import Settings
    from mlxlm.chat.terminal.tools import functions_of

    system_prompt = flags["system_prompt"] and system_prompts.resolve(flags["system_prompt"])
    if prompt not in (None, "-"):
        prompt, mentioned = mentioned_paths(prompt)  # what is piped in is data: it doesn't add files
        flags["files"] += tuple(mentioned)
    files = list(dict.fromkeys(read_file(file) for file in flags["files"]))
    if prompt is not None and flags["server"]:
        _answer_remotely(model, prompt, system_prompt, files, options, flags)
        return
    session, verbose, overflow = flags["session"], flags["verbose"], flags["context_overflow"]
    path = Path(session) if session is not None else autosave.latest_session() if flags["continue_last"] else None
    if flags["sessions"]:
        from mlxlm.chat.terminal.session_picker import choose_session

        if (chosen := choose_session()) is None:
            return
        path = chosen.path
    if model is None:
        if path is not None and (path.exists() or path.is_symlink()):
            model = _model_of(path)
        else:
            from mlxlm.cli.models import choose_model

            model = choose_model(flags["yes"])
    message = read_stdin() if prompt == "-" else None
    tools = functions_of(flags["tools"])
    lm = load_model(model, adapter)
    chat_arguments = given_options(options) | given_values(
        {
            "max_tokens": flags["max_tokens"],
            "chat_template": flags["chat_template"],
            "context_overflow": overflow and ("drop" if overflow == "drop" else "stop"),
            "reasoning_effort": flags["reasoning_effort"],
            "kv": kv if is_given("size", "key_bits") else None,
            "speculation": speculation and speculation(),
        }
    )
    markdown = flags["markdown"]
    settings = Settings(
        flags["reasoning"],
        "auto" if markdown is None else "on" if markdown else "off",
        verbose,
        ask_on_overflow=interactive if overflow is None else overflow == "ask",
    )
    unnamed, cached = interactive and not flags["private"], flags["save_kv_cache"]
    keeper = autosave.Autosave(path, named=session is not None, cached=cached, unnamed=unnamed)
    repl = open_repl(
        lm, load_model, autosave=keeper, settings=settings, chat_arguments=chat_arguments, system_prompt=system_prompt
    )
    if verbose:
        memory_bandwidth()
    with ExitStack() as servers:
        if has_tools:
            repl.use_tools([*tools, *_mcp_tools(flags["mcp"], servers)])
            repl.permissions.always = None if flags["yes"] else set()
        for file in files:
            repl.add_file(file)
        if prompt is not None:
            code = repl.once(prepend_stdin(prompt) if message is None else message)
        else:
            code = repl.run(first_screen(repl.chat) if interactive else (), flags["private"])
    if code:
        sys.exit(code)


def _mcp_tools(commands: Sequence[str], servers: ExitStack) -> Iterator[CallableTool]:
    """Start MCP servers, add them to `servers`, and yield their tools."""
    for command in commands:
        from mlxlm.chat.mcp_tools import McpServer

        with spinner(f"starting {one_line(command)}"):
            yield from servers.enter_context(closing(McpServer(command))).tools


# What the server decides, or a single question doesn't need.
_NOT_REMOTE = [
    *("chat_template", "context_overflow", "session", "continue_last", "sessions", "save_kv_cache", "private", "tools"),
    *("verbose", "yes", "size", "keep", "key_bits", "draft_model", "prompt_lookup", "mcp", "adapter"),
]


def _answer_remotely(
    model: str | None,
    prompt: str,
    system_prompt: str | None,
    files: Sequence[TextFile],
    options: GenerationOptions,
    flags: dict[str, Any],
) -> None:
    from mlxlm.chat.files import with_files
    from mlxlm.chat.terminal.screen import open_screen
    from mlxlm.cli.running_server import print_token_counts, stream_from_server

    server = flags["server"]
    if unused := given_flags(_NOT_REMOTE):
        problem = f"{' and '.join(unused)} would have no effect: the server {server} answers"
        raise click.UsageError(f"{problem} (try: --server '' to answer here)")
    if model is not None and os.path.exists(model):
        model = os.path.basename(os.path.abspath(model))  # as `mlxlm serve` calls it
    message = read_stdin() if prompt == "-" else prepend_stdin(prompt)
    print_token_counts(server, model, files)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": with_files(message, files)})
    fields = {"model": model, "messages": messages, "max_tokens": flags["max_tokens"]}
    fields["reasoning_effort"] = flags["reasoning_effort"]
    markdown = sys.stdout.isatty() if flags["markdown"] is None else flags["markdown"]
    screen = open_screen(flags["reasoning"], markdown)
    stream_from_server(server, given_options(options) | given_values(fields), screen)


def _check_flags(flags: dict[str, Any], has_prompt: bool, interactive: bool) -> None:
    if (flags["tools"] or flags["mcp"]) and not interactive and not flags["yes"]:
        raise click.UsageError("--tools and --mcp need --yes without a terminal, where nobody can allow a call")
    if flags["save_kv_cache"] and flags["session"] is None:
        raise click.UsageError("--save-kv-cache needs --session")
    if sum([flags["session"] is not None, flags["continue_last"], flags["sessions"], flags["private"]]) > 1:
        raise click.UsageError("--session, --continue, --sessions and --private exclude each other")
    if flags["sessions"] and has_prompt:
        raise click.UsageError("--sessions and --prompt exclude each other")
    if flags["context_overflow"] == "ask" and not interactive:
        raise click.UsageError("--context-overflow ask requires a terminal (try: stop or drop)")
    if flags["markdown"] and not sys.stdout.isatty():
        raise click.UsageError("--markdown requires a terminal (try: without it)")


def _model_of(path: Path) -> str:
    """The model that a session file names. Raise GenerationError if it isn't on this machine."""
    from mlxlm.chat.session_file import SessionFiles
    from mlxlm.chat.terminal.autosave import is_model_here

    name = SessionFiles().read(path).model
    if not is_model_here(name):
        raise GenerationError(
            f"{path} is a chat with {name}, which isn't on this machine",
            f"mlxlm chat MODEL --session {shlex.quote(str(path))}, with {name} or another MODEL",
        )
    return name
