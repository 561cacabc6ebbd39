"""`mlxlm generate`: continue a prompt, or all requests of a file, for shells and scripts."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlxlm import generation
from mlxlm.cache.options import KVOptions
from mlxlm.cli import render
from mlxlm.cli.distributed import hosts_option
from mlxlm.cli.generation_options import (
    CONSTRAINT_HINTS,
    Speculation,
    given_options,
    kv_options,
    load_model,
    sampling_options,
    speculation_options,
)
from mlxlm.cli.options import MODEL, SectionedCommand, adapter_option, flag, given_values, offline_option, option
from mlxlm.cli.stdin import prepend_stdin, read_stdin
from mlxlm.generation.options import GenerationOptions
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes

_EPILOG = """\b
Examples:
  mlxlm generate my-model -p "Once upon a time" -n 50
  mlxlm generate my-model --jsonl requests.jsonl --resume results.jsonl
"""

_SYSTEM_PROMPT = "With --chat or --jsonl: system prompt of conversations."
_CHAT_TEMPLATE = "With --chat or --jsonl: chatml, llama3, ..., or a Jinja file."
_SUFFIX = "Generate what is between the prompt and TEXT, with a model for code such as Qwen2.5-Coder."
_BATCH_SIZE = "With --jsonl or --num-samples: texts to generate at once.  [default: 32]"
_PROMPT_CACHE = "Save the prompt's key-value cache to FILE, and reuse what FILE has of it."
_input = partial(option, "Input")
_output = partial(option, "Output")
_memory = partial(option, "Memory and speed")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model", type=MODEL)
@offline_option
@adapter_option("Model")
@_input("-p --prompt", str, "Text to continue; - reads it from standard input.", metavar="TEXT")
@_input("--jsonl", str, "Generate for each request, one JSON object per line; - for stdin.", metavar="FILE")
@_input("--chat", bool, "Send the prompt as a message, in the model's chat template.")
@_input("--system-prompt", str, _SYSTEM_PROMPT, metavar="TEXT", advanced=True)
@_input("--chat-template", str, _CHAT_TEMPLATE, metavar="NAME", advanced=True)
@_input("--suffix", str, _SUFFIX, metavar="TEXT", advanced=True)
@_output("--num-samples", click.IntRange(1, 100_000), "Texts to generate for each prompt.", default=1)
@_output("--json as_json", bool, "Print one JSON object for each text, instead of the text.")
@_output("--ordered", bool, "With --jsonl: write results in the order of the requests.", advanced=True)
@_output("--resume", str, "With --jsonl: write to OUT, and skip requests that are done there.", metavar="OUT")
@_output("-v --verbose", bool, "Print speed and memory to standard error at the end.")
@sampling_options()
@kv_options
@_memory("--prompt-cache-file", str, _PROMPT_CACHE, metavar="FILE", advanced=True)
@speculation_options
@hosts_option
@_memory("--batch-size", click.IntRange(1), _BATCH_SIZE, advanced=True)
def generate(
    model: str,
    *,
    adapter: Path | None,
    prompt: str | None,
    jsonl: str | None,
    options: GenerationOptions,
    kv: KVOptions,
    speculation: Speculation,
    **flags: Any,
) -> None:
    """Continue a prompt with MODEL: a name, a folder, a run, a hub id, or a .gguf or llama2.c .bin file.

    \f

    The text is printed to standard output as it is generated. The prompt is --prompt, or piped input without its last
    line end. With both, piped input comes first, then an empty line, then --prompt. A model's generation_config.json
    can set other sampling defaults.

    With --jsonl, many texts are generated at once; each result is one line of JSON, and the default seed is 0. A line
    of requests.jsonl is {"id": "a", "prompt": "Once upon a time"}, or for an answer in the model's chat template
    {"id": "b", "messages": [{"role": "user", "content": "Hello!"}]}. It may set any option by its Python name:
    "max_tokens": 50. See docs/scripting.md for all fields, and for the Python API.
    """  # noqa: D301 - click's form feed: --help ends there
    _check_flags(flags, prompt, jsonl, options, speculation is not None)
    from mlxlm.chat.chat_encoder import message_encoder
    from mlxlm.generation.jsonl import EncodedPrompt
    from mlxlm.generation.request import encode_prompt
    from mlxlm.tokenizer import FillInTheMiddle

    compile_now = flags["chat"] or flags["chat_template"] is not None
    make_encoder = partial(message_encoder, chat_template=flags["chat_template"], compile_now=compile_now)
    if jsonl is not None:
        from mlxlm.cli.jsonl import run

        run(jsonl, partial(load_model, model, adapter), make_encoder, options, kv, flags)
        return
    text = _prompt_text(prompt)
    lm = load_model(model, adapter)
    if prompt not in (None, "-"):
        text = prepend_stdin(text)
    if flags["chat"]:
        if not text:
            raise GenerationError("the message is empty", "some text to answer")
        messages = [{"role": "system", "content": flags["system_prompt"]}] if flags["system_prompt"] else []
        encoded = make_encoder(lm)([*messages, {"role": "user", "content": text}])
    elif flags["suffix"]:
        middle = FillInTheMiddle(lm.tokenizer)
        encoded = EncodedPrompt(middle.encode(text, flags["suffix"]), lm.eos_token_ids | middle.end_token_ids)
    else:
        encoded = EncodedPrompt(encode_prompt(lm, text), lm.eos_token_ids)
    options, cache_file = lm.generation_options(**given_options(options)), flags["prompt_cache_file"]
    if options.seed is not None and (speculation is not None or cache_file is not None):
        options = options.with_seed(options.seed)  # neither is used for a deterministic text
    request = encoded.request(options)
    engine = generation.Engine(
        lm,
        kv=kv,
        prefix_cache_bytes=None if cache_file is None else sys.maxsize,
        speculation=speculation and speculation(),
        **given_values({"batch_size": flags["batch_size"]}),
    )
    if flags["num_samples"] > 1:
        _print_samples(engine, request, flags["num_samples"], flags["as_json"], flags["verbose"])
        return
    if cache_file is not None and Path(cache_file).exists():
        engine.load_prefix(cache_file)
    result = _print_one(engine, request, flags["as_json"], cache_file)
    if flags["verbose"]:
        _print_statistics(result)
    if result.constraint_error is not None:
        raise GenerationError(result.constraint_error, CONSTRAINT_HINTS.get(result.finish_reason))


def _check_flags(
    flags: dict[str, Any], prompt: str | None, jsonl: str | None, options: GenerationOptions, speculative: bool
) -> None:
    """Raise UsageError for options that contradict each other."""
    one_text, cache_file, resume = (
        jsonl is None and flags["num_samples"] == 1,
        flags["prompt_cache_file"],
        flags["resume"],
    )
    names: tuple[str, ...]
    for names, needed, met in (
        (("ordered", "resume"), "--jsonl", jsonl is not None),
        (("system_prompt", "chat_template"), "--chat or --jsonl", flags["chat"] or jsonl is not None),
        (("batch_size",), "--jsonl or --num-samples", not one_text),
        (("suffix",), "a prompt, not --chat or --jsonl", jsonl is None and not flags["chat"]),
        (("prompt_cache_file",), "a single text, not --jsonl or --num-samples", one_text),
    ):
        for name in names:
            if not met and flags[name] not in (None, False):
                raise click.UsageError(f"{flag(name)} needs {needed}")
    for problem, is_wrong in {
        "--jsonl has its own prompts and always prints JSON: no --prompt, no --json": jsonl is not None
        and (prompt is not None or flags["as_json"]),
        "--resume takes the name of a file": resume in ("", "-"),
        "--prompt-cache-file takes the name of a file": cache_file == "",
        "either --ordered or --resume: results that an interrupted run lacks are added at the end": flags["ordered"]
        and resume is not None,
        "--draft-model or --prompt-lookup needs a single text, not --jsonl or --num-samples": speculative
        and not one_text,
        "--deterministic excludes --draft-model, --prompt-lookup and --prompt-cache-file": options.deterministic
        and (speculative or cache_file is not None),
        "--logprobs needs --json or --jsonl": options.logprobs is not None and not flags["as_json"] and jsonl is None,
    }.items():
        if is_wrong:
            raise click.UsageError(problem)


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or prompt is None and sys.stdin.isatty():
        raise click.UsageError("there is no prompt (try: --prompt TEXT, or pipe in a text)")
    text = read_stdin()
    if not text:
        raise GenerationError("the prompt is empty", "some text to continue")
    return text


def _print_one(
    engine: generation.Engine, request: generation.Request, as_json: bool, cache_file: str | None
) -> generation.GenerationResult:
    """Generate and print one text; save the prompt's key-value cache to `cache_file`."""
    from mlxlm.chat.terminal.output import write
    from mlxlm.generation.jsonl_results import full_result_fields

    prompt_tokens = len(request.prompt)
    with render.spinner(f"reading the prompt, {prompt_tokens} tokens") as update:
        on_prefill = lambda done: update(f"reading the prompt, {done} of {prompt_tokens} tokens")  # noqa: E731
        stream = engine.submit(request, on_prefill=on_prefill)
        first = next(stream, None)
        unread = prompt_tokens - 1 - stream.partial_result().cached_tokens
        if cache_file is not None and unread and not engine.save_prefix(cache_file, request.prompt[:-1]):
            problem = f"{cache_file} isn't written: memory has no room for a copy of the key-value cache"
            raise GenerationError(problem, "--kv-bits 8")
    if as_json:
        for _ in stream:
            pass
        render.emit_json(full_result_fields(stream.result(), engine.lm.tokenizer))
        return stream.result()
    try:
        write("" if first is None else first.text)
        for chunk in stream:
            write(chunk.text)
    finally:
        write("\n")  # also after Ctrl-C, so that the next message starts on a new line
    return stream.result()


def _print_statistics(result: generation.GenerationResult) -> None:
    t = result.timings
    decode = f"{t.tokens_per_second:.1f} tokens/s" if t.tokens_per_second else "one token"
    cached = f" ({result.cached_tokens} cached)" if result.cached_tokens else ""
    render.say(
        f"prompt {result.prompt_tokens} tokens{cached}, {t.prompt_tokens_per_second:.1f} tokens/s; "
        f"first token after {t.time_to_first_token:.2f} s; answer {len(result.tokens)} tokens, {decode}; "
        f"finish reason {result.finish_reason}; seed {result.seed}; "
        f"peak memory of MLX's arrays {human_bytes(t.peak_memory_bytes)}",
        style="dim",
    )
    if (stats := result.speculation) is not None:
        rate = "" if stats.acceptance_rate is None else f" ({stats.acceptance_rate:.0%})"
        why = f"; {stats.reason}" if stats.reason else ""
        render.say(f"{stats.accepted} of {stats.proposed} proposed tokens accepted{rate}{why}", style="dim")


def _print_samples(
    engine: generation.Engine, request: generation.Request, count: int, as_json: bool, verbose: bool
) -> None:
    """Print `count` texts with an empty line between them, or one JSON object each.

    Raises GenerationError at the end if a constrained text is incomplete.
    """
    from mlxlm.chat.terminal.output import write
    from mlxlm.generation.engine import ordered_results
    from mlxlm.generation.gumbel_noise import random_seed
    from mlxlm.generation.jsonl_results import full_result_fields

    if request.options.seed is None:
        request = replace(request, options=replace(request.options, seed=random_seed()))
    requests = (request.sample("1", number) for number in range(count))
    start, tokens, peak, incomplete = time.monotonic(), 0, 0, None
    with closing(generation.run_batch(engine, requests)) as batch:
        results = ordered_results(batch)
        for number in range(count):
            with render.spinner(f"printed {number} of {count} texts"):
                result = next(results)
            tokens, peak = tokens + len(result.tokens), max(peak, result.timings.peak_memory_bytes)
            incomplete = incomplete or (result if result.constraint_error is not None else None)
            if as_json:
                render.emit_json({"sample": number} | full_result_fields(result, engine.lm.tokenizer))
            else:
                write(("\n" if number else "") + result.text + "\n")
    if verbose:
        seconds = time.monotonic() - start
        render.say(
            f"prompt {len(request.prompt)} tokens; {count} texts, {tokens} tokens in {seconds:.1f} s, "
            f"{tokens / seconds:.1f} tokens/s; peak memory of MLX's arrays {human_bytes(peak)}",
            style="dim",
        )
    if incomplete is not None:
        raise GenerationError(
            f"not every text is complete: {incomplete.constraint_error}", CONSTRAINT_HINTS.get(incomplete.finish_reason)
        )
