"""The options that `generate` and `chat` share: sampling, the key-value cache, and speculative decoding.

Sampling options are named as the fields of GenerationOptions. Their defaults are repeated in the help texts, so that
`--help` needn't import MLX; a test compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.load_model import load_model
from mlxlm.cli.options import add_options, option
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder

_stopping = functools.partial(option, "Stopping")
_sampling = functools.partial(option, "Sampling")
_repetition = functools.partial(option, "Repetition penalties")
_constrained = functools.partial(option, "Constrained output")
_memory = functools.partial(option, "Memory and speed")

SAMPLING_OPTIONS = (
    _stopping("-n", "--max-tokens", type=int, metavar="N", help="Generate at most N tokens.  [default: 256]"),
    _stopping("--stop", multiple=True, metavar="TEXT", help="Stop before this text. Repeatable."),
    _sampling(
        "-t",
        "--temp",
        "--temperature",
        "temperature",
        type=float,
        help="Sampling temperature. 0 is greedy; higher values are more random.  [default: 0.7]",
    ),
    _sampling("--seed", type=int, help="Random seed. The same seed gives the same text.  [default: random]"),
    _sampling("--top-k", type=int, help="Sample from the K most likely tokens; 0 disables it.  [default: 0]"),
    _sampling(
        "--top-p",
        type=float,
        help="Nucleus sampling: sample from the most likely tokens that together have this probability; 1 disables "
        "it.  [default: 1.0]",
    ),
    _sampling(
        "--min-p",
        type=float,
        help="Drop tokens less likely than this fraction of the most likely one; 0 disables it.  [default: 0.0]",
    ),
    _sampling(
        "--typical-p",
        type=float,
        help="Locally typical sampling: sample from the tokens whose surprise is closest to the expected surprise, "
        "as many as have this probability; 1 disables it.  [default: 1.0]",
    ),
    _sampling(
        "--xtc-probability",
        type=float,
        help="XTC: probability of dropping the most likely tokens at each step, for more varied text; 0 disables "
        "it.  [default: 0.0]",
    ),
    _sampling(
        "--xtc-threshold",
        type=float,
        help="XTC: drop all tokens at least this likely, except the least likely of them.  [default: 0.1]",
    ),
    _sampling(
        "--logit-bias", multiple=True, metavar="ID=BIAS", help="Add BIAS to the logit of the token ID. Repeatable."
    ),
    _repetition(
        "--repetition-penalty",
        type=float,
        help="Divide or multiply the logits of recent tokens by this, to make them less likely; 1 disables it.  "
        "[default: 1.0]",
    ),
    _repetition(
        "--repetition-context-size",
        type=int,
        help="How many recent tokens --repetition-penalty applies to.  [default: 64]",
    ),
    _repetition(
        "--presence-penalty",
        type=float,
        help="Penalize tokens that were already generated; 0 disables it.  [default: 0.0]",
    ),
    _repetition(
        "--frequency-penalty",
        type=float,
        help="Penalize tokens in proportion to how often they were already generated; 0 disables it.  [default: 0.0]",
    ),
    _repetition(
        "--dry-multiplier",
        type=float,
        help="DRY: strength of the penalty on repeated phrases; 0 disables it.  [default: 0.0]",
    ),
    _repetition(
        "--dry-base",
        type=float,
        help="DRY: factor by which the penalty grows with each token of the phrase.  [default: 1.75]",
    ),
    _repetition("--dry-allowed-length", type=int, help="DRY: penalize phrases from this many tokens on.  [default: 2]"),
    _repetition(
        "--dry-penalty-last-n", type=int, help="DRY: how many recent tokens to search for phrases.  [default: 1024]"
    ),
    _repetition(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help='DRY: text that ends a phrase; "" for none. Repeatable.  [default: newline, colon, double quote, *]',
    ),
    _constrained(
        "--json-schema",
        metavar="FILE|JSON",
        help="Generate JSON that conforms to this schema: a file, or the schema itself.",
    ),
    _constrained("--regex", metavar="REGEX", help="Generate text that matches this regular expression as a whole."),
    _constrained("--choice", multiple=True, metavar="TEXT", help="Generate one of these texts. Repeatable."),
    option(
        "Output",
        "--logprobs",
        type=int,
        metavar="N",
        help="Report the log-probability of each token, and of the N most likely tokens.",
    ),
)

KV_OPTIONS = (
    _memory(
        "--max-kv-size",
        type=int,
        metavar="N",
        help="Limit the key-value cache to N tokens; the oldest are dropped.  [default: unlimited]",
    ),
    _memory(
        "--kv-keep",
        type=int,
        metavar="N",
        help="With --max-kv-size: never drop the first N tokens (attention sinks).  [default: 4]",
    ),
    _memory(
        "--kv-bits",
        metavar="BITS",
        help="Quantize the key-value cache to 8 or 4 bits; 8,4 or none,4 sets keys and values separately.  "
        "[default: none]",
    ),
)

SPECULATION_OPTIONS = (
    _memory(
        "--draft-model",
        metavar="MODEL",
        help="Speculative decoding: this small model proposes tokens. Same text, faster.",
    ),
    _memory(
        "--prompt-lookup",
        is_flag=True,
        help="Speculative decoding: propose what followed the same tokens earlier. Same text, faster.",
    ),
)

# What to try if a constrained text is incomplete, by its finish_reason.
CONSTRAINT_HINTS = {"length": "a larger --max-tokens", "stop": "a --stop that it can't contain, or none"}


def sampling_options(command: Callable | None = None, *, without: Collection[str] = ()) -> Callable:
    """Add the sampling options to a command, which gets them as `options`, a GenerationOptions.

    Args:
        command: The function to decorate.
        without: Fields of GenerationOptions to leave out, as in `@sampling_options(without=["logprobs"])`.
    """
    if command is None:
        return functools.partial(sampling_options, without=without)

    @functools.wraps(command)
    def with_options(**values: Any):
        from mlxlm.generation import GenerationOptions

        settings = {f.name: values.pop(f.name) for f in fields(GenerationOptions) if f.name not in without}
        settings = {name: value for name, value in settings.items() if value not in (None, ())}
        if "json_schema" in settings:
            settings["json_schema"] = _read_schema(settings["json_schema"])
        try:
            options = GenerationOptions(**settings)
        except GenerationError as error:
            raise click.UsageError(str(error)) from error
        return command(options=options, **values)

    with_options = add_options(*SAMPLING_OPTIONS)(with_options)
    with_options.__click_params__ = [p for p in with_options.__click_params__ if p.name not in without]
    return with_options


def kv_options(command: Callable) -> Callable:
    """Add the options of the key-value cache to a command, which gets them as `kv`, a KVOptions."""

    @functools.wraps(command)
    def with_options(*, max_kv_size: int | None, kv_keep: int | None, kv_bits: str | None, **values: Any):
        if kv_keep is not None and max_kv_size is None:
            raise click.UsageError("--kv-keep needs --max-kv-size")
        from mlxlm.cache import KVOptions

        try:
            kv = KVOptions.of(size=max_kv_size, keep=kv_keep, bits=kv_bits)
        except GenerationError as error:
            raise click.UsageError(str(error)) from error
        return command(kv=kv, **values)

    return add_options(*KV_OPTIONS)(with_options)


def speculation_options(command: Callable) -> Callable:
    """Add the options of speculative decoding to a command.

    The command gets `speculation`: None without speculative decoding, else a function that loads the draft model if
    there is one and returns a SpeculativeDecoder.
    """

    @functools.wraps(command)
    def with_options(*, draft_model: str | None, prompt_lookup: bool, **values: Any):
        if draft_model is not None and prompt_lookup:
            raise click.UsageError("either --draft-model or --prompt-lookup")

        def make() -> SpeculativeDecoder:
            from mlxlm.generation.drafters import DraftModel, PromptLookup
            from mlxlm.generation.speculative import SpeculativeDecoder

            return SpeculativeDecoder(PromptLookup() if prompt_lookup else DraftModel(load_model(draft_model)))

        return command(speculation=make if draft_model is not None or prompt_lookup else None, **values)

    return add_options(*SPECULATION_OPTIONS)(with_options)


def _read_schema(schema: str) -> str:
    """JSON text as it is, or the content of the file of this name."""
    from mlxlm.generation.options import MAX_SCHEMA_CHARS
    from mlxlm.utils.bounded_reads import decode_utf8, read_bytes

    if schema.lstrip().startswith("{") or schema in ("true", "false"):
        return schema
    content = read_bytes(Path(schema), MAX_SCHEMA_CHARS, GenerationError)
    return decode_utf8(content, schema, GenerationError, "a JSON file", "utf-8-sig")
