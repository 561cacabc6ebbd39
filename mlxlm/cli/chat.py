"""`mlxlm chat`: a conversation with a model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from mlxlm.backend import platform
from mlxlm.cli.kv_options import kv_options
from mlxlm.cli.sampling_options import sampling_options
from mlxlm.cli.sections import SectionedCommand, option
from mlxlm.cli.speculation_options import load_model, speculation_options
from mlxlm.cli.stdin import prepend_stdin, read_stdin
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.chat.session import Chat
    from mlxlm.generation import GenerationOptions
    from mlxlm.generation.speculative import SpeculativeDecoder


@click.command(cls=SectionedCommand)
@click.argument("model", required=False)
@click.option("--system-prompt", metavar="TEXT", help="The system prompt.")
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this one message and exit; - reads it from stdin.")
@click.option("--session", metavar="FILE", help="Go on with the conversation in FILE, or begin it there.")
@click.option(
    "--save-kv-cache", is_flag=True, help="With --session: keep what was computed as well, so that it opens at once."
)
@click.option(
    "--continue", "continue_last", is_flag=True, help="Go on with the last conversation that has no file of its own."
)
@click.option("--private", is_flag=True, help="Keep neither this conversation nor what is typed.")
@click.option(
    "--chat-template", metavar="NAME", help="chatml, llama3, plain, ... or a jinja file.  [default: the model's]"
)
@click.option(
    "--context-overflow",
    type=click.Choice(["ask", "stop", "drop"]),
    help="With a full context ask, stop, or drop the oldest turns.  "
    "[default: drop where the session does; else ask; stop where nobody can be asked]",
)
@click.option(
    "--reasoning",
    type=click.Choice(["show", "dim", "hide"]),
    default="dim",
    show_default=True,
    help="What is seen of reasoning; dim leaves it out where that is no terminal.",
)
@click.option(
    "--markdown/--no-markdown", default=None, help="Render Markdown.  [default: in a terminal, with a chat template]"
)
@click.option("-v", "--verbose", is_flag=True, help="Tokens and speed after each answer.")
@option(
    "Length and end",
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Stop an answer after so many tokens.  [default: 256 without a chat template]",
)
@sampling_options(without=["logprobs", "max_tokens"])
@kv_options
@speculation_options
def chat(
    model: str | None,
    system_prompt: str | None,
    prompt: str | None,
    session: str | None,
    save_kv_cache: bool,
    continue_last: bool,
    private: bool,
    chat_template: str | None,
    context_overflow: str | None,
    reasoning: str,
    markdown: bool | None,
    verbose: bool,
    max_tokens: int | None,
    options: GenerationOptions,
    kv: KVOptions,
    speculation: Callable[[], SpeculativeDecoder] | None,
) -> None:
    """Chat with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    Ctrl-C stops an answer, /help lists the commands. Piped in, each line is a message (or what is between two
    \"\"\"), and the answers go to standard output one after another. With --prompt what is piped in is part of that one
    message: it comes first, then an empty line, then --prompt. A model without a chat template continues what it is
    given, for 256 tokens; one that has a template ends its answers itself, unless --max-tokens does.

    Conversations in a terminal are kept in a private folder, the last 50 of them: --continue goes on with the last
    one. With --session or --continue MODEL may be left out: it is the one of that conversation.
    """
    if save_kv_cache and session is None:
        raise click.UsageError("--save-kv-cache needs --session")
    if sum([session is not None, continue_last, private]) > 1:
        raise click.UsageError("only one of --session, --continue and --private")
    typed = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if context_overflow == "ask" and not typed:
        raise click.UsageError("--context-overflow is ask, and nobody is there to be asked (try: stop or drop)")
    if markdown and not sys.stdout.isatty():
        raise click.UsageError("--markdown needs a terminal (try: without it)")
    from mlxlm.chat.session import Chat
    from mlxlm.chat.terminal import autosave
    from mlxlm.chat.terminal.repl import Repl, print_notes
    from mlxlm.chat.terminal.settings import Settings
    from mlxlm.chat.terminal.statistics import memory_bandwidth

    path = Path(session) if session is not None else autosave.latest_session() if continue_last else None
    opened = path is not None and (path.exists() or path.is_symlink())
    if model is None and not opened:
        raise click.UsageError("which MODEL? (try: mlxlm chat MODEL, or --continue)")
    model = model or _model_of(path)
    message = read_stdin() if prompt == "-" else prompt
    lm = load_model(model)
    given = {f.name: getattr(options, f.name) for f in fields(options) if _is_given(f.name)} | {
        "max_tokens": max_tokens,
        "chat_template": chat_template,
        "context_overflow": context_overflow and ("drop" if context_overflow == "drop" else "stop"),
        "kv": kv if _is_given("max_kv_size", "kv_bits") else None,
        "speculation": speculation and speculation(),
    }
    given = {name: value for name, value in given.items() if value is not None}
    chat = Chat.open(path, lm, **given) if opened else Chat(lm, **given)
    chat.system_prompt = chat.system_prompt if system_prompt is None else system_prompt
    print_notes(chat)
    looks = "auto" if markdown is None else "on" if markdown else "off"
    ask_on_overflow = typed if context_overflow is None else context_overflow == "ask"
    keeper = autosave.Autosave(path, named=session is not None, cached=save_kv_cache, unnamed=typed and not private)
    repl = Repl(chat, Settings(reasoning, looks, verbose, ask_on_overflow), keeper, load_model, given)
    if verbose:
        memory_bandwidth()
    if prompt is not None:
        repl.once(message if prompt == "-" else prepend_stdin(prompt))
    else:
        sys.exit(repl.run(_greeting(model, chat), private))


def _model_of(path: Path) -> str:
    """The model that a session file names, if it is on this machine: a file from elsewhere is no reason to download
    something."""
    from mlxlm.chat.session_files import SessionFiles

    name = SessionFiles().read(path).model
    repository, _, revision = name.partition("@")
    folder = platform.model_cache() / "--".join(["models", *repository.split("/")])
    cached = any((folder / kind / (revision or "main")).exists() for kind in ("refs", "snapshots"))
    if not os.path.exists(name) and not cached:
        raise GenerationError(
            f"{path} is a chat with {name}, which isn't on this machine",
            f"mlxlm chat MODEL --session {shlex.quote(str(path))}, with {name} or another MODEL",
        )
    return name


def _is_given(*names: str) -> bool:
    """Whether one of these options is on the command line: only then it counts before what a session has."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is ParameterSource.COMMANDLINE for name in names)


def _greeting(model: str, chat: Chat) -> list[str]:
    from mlxlm.chat.chat_template import PLAIN

    lines = [f"{model}: a context of {chat.context_size} tokens. /help lists the commands."]
    if messages := sum(message.role != "system" for message in chat.messages):
        lines.append(f"Going on after {messages} messages, /show messages shows them.")
    if chat.chat_template == PLAIN:
        limit = chat.options.max_tokens
        until = "it ends the text itself" + (f", or for {limit} tokens (--max-tokens)" if limit else "")
        lines.append(f"This model has no chat template: it continues your text until {until}.")
    return lines
