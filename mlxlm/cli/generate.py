"""`mlxlm generate`: continue a prompt, for shells and scripts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mlxlm.cli.sampling_options import sampling_options
from mlxlm.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation import GenerationOptions, LoadedModel, Result, TextStream


@click.command()
@click.argument("model")
@click.option("-p", "--prompt", help="The text to continue; - reads it from standard input.")
@click.option("--chat", is_flag=True, help="Ask the prompt as a message, in the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system prompt.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("-v", "--verbose", is_flag=True, help="Speed and memory on standard error, at the end.")
def generate(
    model: str,
    prompt: str | None,
    chat: bool,
    system: str | None,
    options: GenerationOptions,
    as_json: bool,
    verbose: bool,
) -> None:
    """Continue a prompt with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    The text goes to standard output as it is generated. Without --prompt it continues what is piped in,
    less one line end at its end.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    from mlxlm.generation import TextStream, load

    text = _prompt_text(prompt)
    loaded = load(model)
    ids, end_ids = _encode_chat(loaded, text, system) if chat else (loaded.tokenizer.encode(text), loaded.end_ids)
    stream = TextStream(loaded, ids, options, end_ids=end_ids)
    if as_json:
        _print_json(stream)
    else:
        _print_text(stream)
    if verbose:
        _say_statistics(stream.result)


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("there is no prompt (try: --prompt TEXT, or pipe a text in)")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise GenerationError(f"standard input is not UTF-8: {reason}", "a text file in UTF-8") from None
    if not prompt:
        raise GenerationError("the prompt is empty", "some text to continue")
    return prompt


def _encode_chat(loaded: LoadedModel, text: str, system: str | None) -> tuple[list[int], frozenset[int]]:
    from mlxlm.chat.template import ChatTemplate, Message

    if loaded.tokenizer.chat_template is None:
        raise GenerationError(f"{loaded.path} has no chat template", "the same without --chat")
    template = ChatTemplate(loaded.tokenizer)
    messages = [Message("system", system)] if system else []
    return template.encode([*messages, Message("user", text)]), loaded.end_ids | template.end_ids


def _print_text(stream: TextStream) -> None:
    from mlxlm.chat.terminal import write

    try:
        for chunk in stream:
            write(chunk.text)
    finally:
        write("\n")  # also after Ctrl-C: what is said next begins on a line of its own


def _print_json(stream: TextStream) -> None:
    from mlxlm.cli.render import emit_json

    for _ in stream:
        pass
    emit_json({**asdict(stream.result), "tokens": len(stream.result.tokens)})


def _say_statistics(result: Result) -> None:
    from mlxlm.cli.render import human_bytes, say

    t = result.timings
    decode = f"{t.tokens_per_second:.1f} tokens/s" if t.tokens_per_second else "one token"
    say(
        f"prompt {result.prompt_tokens} tokens, {t.prompt_tokens_per_second:.1f} tokens/s; "
        f"first token after {t.first_token_seconds:.2f} s; answer {len(result.tokens)} tokens, {decode}; "
        f"ended by {result.finish_reason}; seed {result.seed}; peak {human_bytes(t.peak_memory_bytes)}",
        style="dim",
    )
