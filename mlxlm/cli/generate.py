"""`mlxlm generate`: continue a prompt, or serve a file of requests, for shells and scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.kv_options import kv_options
from mlxlm.cli.sampling_options import CONSTRAINT_HINTS, sampling_options
from mlxlm.cli.sections import SectionedCommand, option
from mlxlm.cli.speculation_options import load_model, speculation_options
from mlxlm.cli.spinner import spinner
from mlxlm.cli.stdin import prepend_stdin, read_stdin
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.chat.chat_template import ChatEncoder
    from mlxlm.generation import Context, GenerationOptions, GenerationResult, LoadedModel, TextStream
    from mlxlm.generation.jsonl.requests import EncodedPrompt, Messages
    from mlxlm.generation.speculative import SpeculativeDecoder

_EPILOG = """\b
Examples:
  mlxlm generate my-model -p "Once upon a time" -n 50
  mlxlm generate my-model --jsonl requests.jsonl --resume results.jsonl

A line of requests.jsonl is {"id": "a", "prompt": "Once upon a time"} or, to be answered in the model's chat template,
{"id": "b", "messages": [{"role": "user", "content": "Hello!"}]}; it may have any option, under its Python name
("max_tokens": 50). All of it, the lines of results and the Python interface: docs/scripting.md
"""

_input = partial(option, "Input")
_output = partial(option, "Output")
_memory = partial(option, "Memory and speed")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model")
@_input("-p", "--prompt", help="The text to continue; - reads it from standard input.")
@_input("--jsonl", metavar="FILE", help="Serve requests, one JSON object per line; - reads standard input.")
@_input("--chat", is_flag=True, help="Ask the prompt as a message, in the model's chat template.")
@_input("--system-prompt", metavar="TEXT", help="With --chat or --jsonl: the system prompt of conversations.")
@_input("--chat-template", metavar="NAME", help="With --chat or --jsonl: chatml, llama3, ..., or a jinja file.")
@sampling_options
@_output("--num-samples", type=click.IntRange(1, 100_000), default=1, metavar="N", help="N texts for each prompt.")
@_output("--json", "as_json", is_flag=True, help="Print one JSON object for each text instead of the text.")
@_output("--ordered", is_flag=True, help="With --jsonl: results in the order of the requests.")
@_output("--resume", metavar="OUT", help="With --jsonl: write to OUT, and skip what is done there.")
@_output("-v", "--verbose", is_flag=True, help="Speed and memory on standard error, at the end.")
@kv_options
@_memory("--prompt-cache-file", metavar="FILE", help="Go on from what FILE holds of the prompt, and keep it there.")
@speculation_options
@_memory(
    "--batch-size",
    type=click.IntRange(1),
    metavar="N",
    help="With --jsonl or --num-samples: how many texts grow side by side.  [default: 32]",
)
def generate(
    model: str,
    prompt: str | None,
    jsonl: str | None,
    chat: bool,
    system_prompt: str | None,
    chat_template: str | None,
    options: GenerationOptions,
    num_samples: int,
    kv: KVOptions,
    speculation: Callable[[], SpeculativeDecoder] | None,
    prompt_cache_file: str | None,
    batch_size: int | None,
    ordered: bool,
    resume: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Continue a prompt with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    The text goes to standard output as it is generated. The prompt is --prompt, or what is piped in, less one line
    end at its end; with both, what is piped in comes first, then an empty line, then --prompt. With --jsonl many
    requests are served at once, each result one line of JSON, and the seed is 0 if none is given.
    """
    several = jsonl is not None or num_samples > 1
    if jsonl is not None and (prompt is not None or as_json):
        raise click.UsageError("--jsonl has its own prompts and always prints JSON: no --prompt, no --json")
    _need("--jsonl", jsonl is not None, ordered=ordered, resume=resume)
    if resume in ("", "-"):
        raise click.UsageError("--resume takes the name of a file")
    if prompt_cache_file == "":
        raise click.UsageError("--prompt-cache-file takes the name of a file")
    if ordered and resume is not None:
        raise click.UsageError("either --ordered or --resume: what an interrupted run has left open comes at the end")
    _need("--chat or --jsonl", chat or jsonl is not None, system_prompt=system_prompt, chat_template=chat_template)
    _need("--jsonl or --num-samples", several, batch_size=batch_size)
    _need("a single text, not --jsonl or --num-samples", not several, prompt_cache_file=prompt_cache_file)
    if speculation is not None and several:
        raise click.UsageError("--draft-model or --prompt-lookup needs a single text, not --jsonl or --num-samples")
    if options.logprobs is not None and not (as_json or jsonl is not None):
        raise click.UsageError("--logprobs needs --json or --jsonl")
    conversations = partial(_conversations, chat_template, chat or chat_template is not None)
    if jsonl is not None:
        from mlxlm.cli.jsonl import run

        run(
            jsonl,
            partial(load_model, model),
            conversations,
            options,
            kv,
            chat=chat,
            system_prompt=system_prompt,
            num_samples=num_samples,
            batch_size=batch_size,
            ordered=ordered,
            resume=resume,
            verbose=verbose,
        )
        return
    from mlxlm.generation.stream_generate import encode_prompt

    text = _prompt_text(prompt)
    lm = load_model(model)
    if prompt not in (None, "-"):
        text = prepend_stdin(text)
    if chat and not text:
        raise GenerationError("the message is empty", "some text to answer")
    if chat:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        ids, eos_token_ids = conversations(lm)([*messages, {"role": "user", "content": text}])
    else:
        ids, eos_token_ids = encode_prompt(lm, text), lm.eos_token_ids
    if num_samples > 1:
        from mlxlm.cli.generate_samples import print_samples
        from mlxlm.generation import Request

        asked = Request(ids, options, eos_token_ids)
        print_samples(lm, asked, num_samples, kv=kv, batch_size=batch_size, as_json=as_json, verbose=verbose)
        return
    context = _context(lm, kv, prompt_cache_file)
    settings = {"context": context, "eos_token_ids": eos_token_ids, "speculation": speculation and speculation()}
    save = None if prompt_cache_file is None else partial(context.save, prompt_cache_file, lm, replace=True)
    result = _print_one(lm, ids, options, settings, save, as_json)
    if verbose:
        _say_statistics(result)
    if result.constraint_error is not None:
        raise GenerationError(result.constraint_error, CONSTRAINT_HINTS.get(result.finish_reason))


def _need(what: str, is_there: bool, **given: Any) -> None:
    """Raise UsageError for the first of `given` options that needs what isn't there."""
    for name, value in given.items():
        if value not in (None, False) and not is_there:
            raise click.UsageError(f"--{name.replace('_', '-')} needs {what}")


def _prompt_text(prompt: str | None) -> str:
    piped = prompt in (None, "-")
    if piped and (sys.stdin is None or prompt is None and sys.stdin.isatty()):
        raise click.UsageError("there is no prompt (try: --prompt TEXT, or pipe a text in)")
    if piped:
        prompt = read_stdin()
        if not prompt:
            raise GenerationError("the prompt is empty", "some text to continue")
    return prompt


def _conversations(chat_template: str | None, at_once: bool, lm: LoadedModel) -> Callable[[Messages], EncodedPrompt]:
    """What encodes conversations. The template is compiled with the first of them, or here if `at_once`."""
    from mlxlm.chat.chat_template import PLAIN, Message, chat_encoder

    @cache
    def form() -> ChatEncoder:
        found = chat_encoder(lm, chat_template)
        if chat_template is None and found.name == PLAIN:
            raise GenerationError(f"{lm.path} has no chat template", "a prompt to continue, or --chat-template")
        return found

    def encode(messages: Messages) -> EncodedPrompt:
        ids = form().encode([Message(message["role"], message["content"]) for message in messages])
        return ids, lm.eos_token_ids | form().eos_token_ids

    if at_once:
        form()
    return encode


def _context(lm: LoadedModel, kv: KVOptions, prompt_cache_file: str | None) -> Context:
    from mlxlm.generation import Context

    context = Context(lm.model, kv)
    if prompt_cache_file is not None and Path(prompt_cache_file).exists():
        context.load(prompt_cache_file, lm)
    return context


def _print_one(
    lm: LoadedModel,
    ids: list[int],
    options: GenerationOptions,
    settings: dict[str, Any],
    save: Callable[[], None] | None,
    as_json: bool,
) -> GenerationResult:
    """`settings`: those of TextStream. `save` keeps what was read of the prompt."""
    from mlxlm.generation import TextStream

    with spinner(f"reading the prompt, {len(ids)} tokens") as update:

        def on_prefill(done: int) -> None:
            update(f"reading the prompt, {done} of {len(ids)} tokens")
            # Now, and not at the end: what decoding adds can push out of a bounded cache what a later prompt needs.
            if save is not None and done == len(ids) - 1:
                save()

        stream = TextStream(lm, ids, options, on_prefill=on_prefill, **settings)
        first = next(stream, None)
    if as_json:
        _print_json(stream, lm)
    else:
        _print_text(stream, "" if first is None else first.text)
    return stream.result


def _print_text(stream: TextStream, beginning: str) -> None:
    from mlxlm.chat.terminal import write

    try:
        write(beginning)
        for chunk in stream:
            write(chunk.text)
    finally:
        write("\n")  # also after Ctrl-C: what is said next begins on a line of its own


def _print_json(stream: TextStream, lm: LoadedModel) -> None:
    from mlxlm.cli import render
    from mlxlm.generation.jsonl.results import full_result_fields

    for _ in stream:
        pass
    render.emit_json(full_result_fields(stream.result, lm.tokenizer))


def _say_statistics(result: GenerationResult) -> None:
    from mlxlm.cli.render import say

    t = result.timings
    decode = f"{t.tokens_per_second:.1f} tokens/s" if t.tokens_per_second else "one token"
    kept = f" ({result.cached_tokens} kept from before)" if result.cached_tokens else ""
    say(
        f"prompt {result.prompt_tokens} tokens{kept}, {t.prompt_tokens_per_second:.1f} tokens/s; "
        f"first token after {t.time_to_first_token:.2f} s; answer {len(result.tokens)} tokens, {decode}; "
        f"ended by {result.finish_reason}; seed {result.seed}; peak {human_bytes(t.peak_memory_bytes)}",
        style="dim",
    )
    if (stats := result.speculation) is not None:
        rate = "" if stats.acceptance_rate is None else f" ({stats.acceptance_rate:.0%})"
        why = f"; {stats.reason}" if stats.reason else ""
        say(f"{stats.accepted} of {stats.proposed} proposed tokens accepted{rate}{why}", style="dim")
