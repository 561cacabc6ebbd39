"""`mlxlm chat`: a conversation with a model."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlxlm.cli.kv_options import kv_options
from mlxlm.cli.sampling_options import sampling_options
from mlxlm.cli.waiting import waiting

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.chat.session import Chat
    from mlxlm.generation import GenerationOptions, LoadedModel
    from mlxlm.generation.speculative import Speculation


@click.command()
@click.argument("model", required=False)
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this one message and exit.")
@click.option("--session", metavar="FILE", help="Go on with the conversation in FILE, or begin it there.")
@click.option("--cache", is_flag=True, help="With --session: keep what was computed as well, so that it opens at once.")
@click.option("--continue", "go_on", is_flag=True, help="Go on with the last conversation that has no file of its own.")
@click.option("--private", is_flag=True, help="Keep neither this conversation nor what is typed.")
@click.option("--template", metavar="NAME", help="chatml, llama3, plain, ... or a jinja file.  [default: the model's]")
@click.option(
    "--overflow",
    type=click.Choice(["ask", "stop", "drop"]),
    help="With a full context ask, stop, or drop the oldest turns.  [default: ask; stop where nobody can be asked]",
)
@click.option(
    "--think",
    type=click.Choice(["show", "dim", "hide"]),
    default="dim",
    show_default=True,
    help="What is seen of reasoning; dim leaves it out where that is no terminal.",
)
@click.option("--markdown/--no-markdown", default=None, help="Render Markdown.  [default: with a chat template]")
@click.option("--draft", metavar="MODEL", help="A small model that proposes tokens: the same text, sooner.")
@click.option("--lookup", is_flag=True, help="Propose what followed the same words earlier: the same text, sooner.")
@click.option("-v", "--verbose", is_flag=True, help="Tokens and speed after each answer.")
@sampling_options(without=["logprobs"])
@kv_options
def chat(
    model: str | None,
    system: str | None,
    prompt: str | None,
    session: str | None,
    cache: bool,
    go_on: bool,
    private: bool,
    template: str | None,
    overflow: str | None,
    think: str,
    markdown: bool | None,
    draft: str | None,
    lookup: bool,
    verbose: bool,
    options: GenerationOptions,
    kv: KVOptions,
) -> None:
    """Chat with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    Ctrl-C stops an answer, /help lists the commands. Piped in, each line is a message (or what is between two
    \"\"\"), and the answers go to standard output one after another. A model without a chat template continues what
    it is given, for 256 tokens; one that has a template ends its answers itself, unless --max-tokens does.

    Conversations in a terminal are kept in a private folder, the last 50 of them: --continue goes on with the last
    one. With --session or --continue MODEL may be left out: it is the one of that conversation.
    """
    if cache and session is None:
        raise click.UsageError("--cache needs --session")
    if sum([session is not None, go_on, private]) > 1:
        raise click.UsageError("only one of --session, --continue and --private")
    if draft and lookup:
        raise click.UsageError("either --draft or --lookup")
    from mlxlm.chat.terminal import keeping
    from mlxlm.chat.terminal.loop import Talk
    from mlxlm.chat.terminal.settings import Settings
    from mlxlm.chat.terminal.statistics import measure_bandwidth

    path = Path(session) if session is not None else keeping.latest() if go_on else None
    opened = path is not None and (path.exists() or path.is_symlink())
    if model is None and not opened:
        raise click.UsageError("which MODEL? (try: mlxlm chat MODEL, or --continue)")
    model = model or _model_of(path)
    loaded = _load(model)
    asked = overflow or ("ask" if prompt is None and sys.stdin is not None and sys.stdin.isatty() else "stop")
    given = {
        "template": template,
        "overflow": "drop" if asked == "drop" else "stop",
        "kv": kv if _is_given("kv_size", "kv_bits") else None,
        "speculation": _speculation(draft, lookup),
        **{f.name: getattr(options, f.name) for f in fields(options) if _is_given(f.name)},
    }
    talking = _open(path, loaded, system, given) if opened else _begin(loaded, system, given)
    settings = Settings(think, _is_for_markdown(markdown, talking), verbose, asked)
    keeps = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    keeper = keeping.Keeper(
        path, named=session is not None, cached=cache, enabled=not private and (keeps or path is not None)
    )
    if verbose:
        measure_bandwidth()
    talk = Talk(talking, settings, keeper, _load)
    if prompt is not None:
        talk.once(prompt)
        keeper.finish(talk.chat)
    else:
        talk.run(_greeting(model, talking), private)


def _begin(loaded: LoadedModel, system: str | None, given: dict[str, Any]) -> Chat:
    from mlxlm.chat.session import Chat

    chat = Chat(loaded, system=system, **given)
    if chat.template != "plain" and "max_tokens" not in given:
        from dataclasses import replace

        chat.options = replace(chat.options, max_tokens=None)
    return chat


def _open(path: Path, loaded: LoadedModel, system: str | None, given: dict[str, Any]) -> Chat:
    from mlxlm.chat.session import Chat
    from mlxlm.chat.terminal.output import say

    chat = Chat.open(path, loaded, **given)
    if system is not None:
        chat.system = system
    for note in chat.notes:
        say(note)
    return chat


def _model_of(path: Path) -> str:
    """The model that a session file names."""
    from mlxlm.chat.session_files import OwnFiles

    return OwnFiles().read(path).model


def _load(model: str) -> LoadedModel:
    from mlxlm.generation import load

    # A path is kept in the session, which may be opened from another folder.
    with waiting(f"loading {model}"):
        return load(os.path.abspath(model) if os.path.exists(model) else model)


def _speculation(draft: str | None, lookup: bool) -> Speculation | None:
    if not (draft or lookup):
        return None
    from mlxlm.generation.drafts import DraftModel, NgramLookup
    from mlxlm.generation.speculative import Speculation

    return Speculation(DraftModel(_load(draft)) if draft else NgramLookup())


def _is_given(*names: str) -> bool:
    """Whether one of these options is on the command line: only then it counts before what a session has."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is ParameterSource.COMMANDLINE for name in names)


def _is_for_markdown(wanted: bool | None, chat: Chat) -> bool:
    """A model that just continues a text means its line ends."""
    return chat.template != "plain" if wanted is None else wanted


def _greeting(model: str, chat: Chat) -> list[str]:
    lines = [f"{model}: a context of {chat.context_size} tokens. /help lists the commands."]
    if messages := sum(message.role != "system" for message in chat.messages):
        lines.append(f"Going on after {messages} messages, /show messages shows them.")
    if chat.template == "plain":
        lines.append(
            "This model has no chat template: it continues your text until it ends the text itself, or for "
            f"{chat.options.max_tokens} tokens (--max-tokens)."
        )
    return lines
