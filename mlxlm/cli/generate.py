"""`mlxlm generate`: continue a prompt, or serve a file of requests, for shells and scripts."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.kv_options import kv_options
from mlxlm.cli.sampling_options import sampling_options
from mlxlm.cli.waiting import waiting
from mlxlm.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.generation import Context, GenerationOptions, LoadedModel, Result, TextStream
    from mlxlm.generation.requests import Encoded, Messages
    from mlxlm.generation.speculative import Speculation

BATCH_SIZE = 32


@click.command()
@click.argument("model")
@click.option("-p", "--prompt", help="The text to continue; - reads it from standard input.")
@click.option("--jsonl", metavar="FILE", help="Serve requests, one JSON object per line; - reads standard input.")
@click.option("--chat", is_flag=True, help="Ask the prompt as a message, in the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat or --jsonl: the system prompt.")
@click.option("--template", metavar="NAME", help="With --chat or --jsonl: chatml, llama3, ..., or a jinja file.")
@sampling_options
@click.option("--samples", type=click.IntRange(1, 100_000), default=1, metavar="N", help="N texts for each prompt.")
@kv_options
@click.option("--draft", metavar="MODEL", help="A small model that proposes tokens: the same text, sooner.")
@click.option("--lookup", is_flag=True, help="Propose what followed the same words earlier: the same text, sooner.")
@click.option("--prompt-cache", metavar="FILE", help="Go on from what FILE holds of the prompt, and keep it there.")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help=f"Texts at once.  [default: {BATCH_SIZE}]")
@click.option("--ordered", is_flag=True, help="With --jsonl: results in the order of the requests.")
@click.option("--resume", metavar="OUT", help="With --jsonl: write to OUT, and skip what is done there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each text instead of the text.")
@click.option("-v", "--verbose", is_flag=True, help="Speed and memory on standard error, at the end.")
def generate(
    model: str,
    prompt: str | None,
    jsonl: str | None,
    chat: bool,
    system: str | None,
    template: str | None,
    options: GenerationOptions,
    samples: int,
    kv: KVOptions,
    draft: str | None,
    lookup: bool,
    prompt_cache: str | None,
    batch_size: int | None,
    ordered: bool,
    resume: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Continue a prompt with MODEL: a model folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    The text goes to standard output as it is generated. Without --prompt it continues what is piped in,
    less one line end at its end. With --jsonl many requests are served at once, each result one line of JSON,
    and the seed is 0 if none is given.
    """
    several = jsonl is not None or samples > 1
    if jsonl is not None and (prompt is not None or as_json):
        raise click.UsageError("--jsonl has its own prompts and always prints JSON: no --prompt, no --json")
    _need("--jsonl", jsonl is not None, ordered=ordered, resume=resume)
    _need("--chat or --jsonl", chat or jsonl is not None, system=system, template=template)
    _need("--jsonl or --samples", several, batch_size=batch_size)
    _need("a single text, not --jsonl or --samples", not several, draft=draft, lookup=lookup, prompt_cache=prompt_cache)
    if options.logprobs is not None and not (as_json or jsonl is not None):
        raise click.UsageError("--logprobs needs --json or --jsonl")
    if draft and lookup:
        raise click.UsageError("either --draft or --lookup")
    encode_messages = partial(_encode_messages, template)
    if jsonl is not None:
        from mlxlm.cli.jsonl import Job, run

        job = Job(
            source=jsonl,
            options=options,
            kv=kv,
            chat=chat,
            system=system,
            samples=samples,
            batch_size=batch_size or BATCH_SIZE,
            ordered=ordered,
            resume=resume,
            verbose=verbose,
        )
        run(job, partial(_load, model), encode_messages)
        return
    text = _prompt_text(prompt)
    loaded = _load(model)
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        ids, end_ids = encode_messages(loaded, [*messages, {"role": "user", "content": text}])
    else:
        ids, end_ids = loaded.tokenizer.encode(text), loaded.end_ids
    if samples > 1:
        from mlxlm.cli.samples import Samples, print_samples

        asked = Samples(ids, end_ids, options, kv, samples, batch_size or BATCH_SIZE, as_json, verbose)
        print_samples(loaded, asked)
        return
    context = _context(loaded, kv, prompt_cache)
    result = _print_one(loaded, ids, end_ids, options, context, _speculation(draft, lookup), as_json)
    if prompt_cache is not None and result.cached_tokens < result.prompt_tokens - 1:
        context.save(prompt_cache, loaded, replace=True)
    if verbose:
        _say_statistics(result)
    if result.complaint is not None:
        raise GenerationError(result.complaint, "a larger --max-tokens" if result.finish_reason == "length" else None)


def _need(what: str, is_there: bool, **given: Any) -> None:
    """Raise UsageError for the first of `given` options that needs what isn't there."""
    for name, value in given.items():
        if value and not is_there:
            raise click.UsageError(f"--{name.replace('_', '-')} needs {what}")


def _load(model: str) -> LoadedModel:
    from mlxlm.generation import load

    with waiting(f"loading {model}"):
        return load(model)


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


def _encode_messages(template: str | None, loaded: LoadedModel, messages: Messages) -> Encoded:
    from mlxlm.chat.template import PLAIN, Message, transcript

    form = transcript(loaded, template)
    if template is None and form.name == PLAIN:
        raise GenerationError(f"{loaded.path} has no chat template", "a prompt to continue, or --template")
    ids = form.encode([Message(message["role"], message["content"]) for message in messages])
    return ids, loaded.end_ids | form.end_ids


def _context(loaded: LoadedModel, kv: KVOptions, prompt_cache: str | None) -> Context:
    from pathlib import Path

    from mlxlm.generation import Context

    context = Context(loaded.model, kv)
    if prompt_cache is not None and Path(prompt_cache).exists():
        context.load(prompt_cache, loaded)
    return context


def _speculation(draft: str | None, lookup: bool) -> Speculation | None:
    if not draft and not lookup:
        return None
    from mlxlm.generation.drafts import DraftModel, NgramLookup
    from mlxlm.generation.speculative import Speculation

    return Speculation(NgramLookup() if lookup else DraftModel(_load(draft)))


def _print_one(
    loaded: LoadedModel,
    ids: list[int],
    end_ids: frozenset[int],
    options: GenerationOptions,
    context: Context,
    speculation: Speculation | None,
    as_json: bool,
) -> Result:
    from mlxlm.generation import TextStream

    with waiting(f"reading the prompt, {len(ids)} tokens") as update:

        def on_prefill(done: int) -> None:
            update(f"reading the prompt, {done} of {len(ids)} tokens")

        settings = {"context": context, "end_ids": end_ids, "on_prefill": on_prefill, "speculation": speculation}
        stream = TextStream(loaded, ids, options, **settings)
        first = next(stream, None)
    if as_json:
        _print_json(stream, loaded)
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


def _print_json(stream: TextStream, loaded: LoadedModel) -> None:
    from mlxlm.cli.render import emit_json
    from mlxlm.generation.result_lines import whole_fields

    for _ in stream:
        pass
    emit_json(whole_fields(stream.result, loaded.tokenizer))


def _say_statistics(result: Result) -> None:
    from mlxlm.cli.render import human_bytes, say

    t = result.timings
    decode = f"{t.tokens_per_second:.1f} tokens/s" if t.tokens_per_second else "one token"
    kept = f" ({result.cached_tokens} kept from before)" if result.cached_tokens else ""
    say(
        f"prompt {result.prompt_tokens} tokens{kept}, {t.prompt_tokens_per_second:.1f} tokens/s; "
        f"first token after {t.first_token_seconds:.2f} s; answer {len(result.tokens)} tokens, {decode}; "
        f"ended by {result.finish_reason}; seed {result.seed}; peak {human_bytes(t.peak_memory_bytes)}",
        style="dim",
    )
    if (stats := result.speculation) is not None:
        rate = "" if stats.acceptance is None else f" ({stats.acceptance:.0%})"
        why = f"; {stats.reason}" if stats.reason else ""
        say(f"{stats.accepted} of {stats.proposed} proposed tokens accepted{rate}{why}", style="dim")
