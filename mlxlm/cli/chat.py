"""`mlxlm chat`: a conversation with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxlm.cli.sampling_options import sampling_options

if TYPE_CHECKING:
    from mlxlm.generation import GenerationOptions


@click.command()
@click.argument("model")
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this one message and exit.")
@sampling_options
def chat(model: str, system: str | None, prompt: str | None, options: GenerationOptions) -> None:
    """Chat with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    Ctrl-C stops an answer, /help lists the commands. Piped in, each line is a message, and the answers go
    to standard output one after another. A model without a chat template continues what it is given.
    """
    from mlxlm.chat import terminal
    from mlxlm.chat.session import ChatSession
    from mlxlm.generation import load

    loaded = load(model)
    session = ChatSession(loaded, system, options)
    if prompt is not None:
        terminal.answer(session, prompt)
        return
    greeting = [f"{model}: a context of {session.stats.context_size} tokens. /help lists the commands."]
    if loaded.tokenizer.chat_template is None:
        greeting.append(
            "This model has no chat template: it continues your text until it ends the text itself, or for "
            f"{options.max_tokens} tokens (--max-tokens)."
        )
    terminal.run(session, greeting)
