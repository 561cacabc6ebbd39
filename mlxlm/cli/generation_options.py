"""What `generate` and `chat` share: loading a model; options of sampling, the cache and speculative decoding.

Sampling options are named as the fields of GenerationOptions. Their defaults are repeated in the help texts, so that
`--help` needn't import MLX; a test compares them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.model_options import MODEL
from mlxlm.cli.options import add_options, is_given, option
from mlxlm.cli.spinner import spinner
from mlxlm.utils.errors import GenerationError, one_line

if TYPE_CHECKING:
    from mlxlm.generation import GenerationOptions, LoadedModel
    from mlxlm.generation.speculative import SpeculativeDecoder

_stopping = functools.partial(option, "Stopping")
_sampling = functools.partial(option, "Sampling")
_repetition = functools.partial(option, "Repetition penalties")
_constrained = functools.partial(option, "Constrained output")
_memory = functools.partial(option, "Memory and speed")

_TEMPERATURE = "Sampling temperature. 0 is greedy; higher values are more random.  [default: 0.7]"
_TOP_P = "Nucleus sampling: the most likely tokens with this total probability; 1 disables it.  [default: 1.0]"
_MIN_P = "Drop tokens less likely than this fraction of the most likely one; 0 disables it.  [default: 0.0]"
_TYPICAL_P = (
    "Locally typical sampling: the tokens whose surprise is closest to the expected surprise, with this total "
    "probability; 1 disables it.  [default: 1.0]"
)
_XTC_PROBABILITY = (
    "XTC: probability of dropping the most likely tokens at each step, for more varied text; 0 disables it.  "
    "[default: 0.0]"
)
_XTC_THRESHOLD = "XTC: drop all tokens at least this likely, except the least likely of them.  [default: 0.1]"
_DETERMINISTIC = (
    "On a GPU, read and decode the text by itself, so that its rounding doesn't depend on other texts.  "
    "[default: if a seed is given]"
)
_LOGIT_BIAS = "Add BIAS to the logit of the token ID. Repeatable."
_REPETITION_PENALTY = "Divide or multiply the logits of recent tokens by this; 1 disables it.  [default: 1.0]"
_CONTEXT_SIZE = "How many recent tokens --repetition-penalty applies to.  [default: 64]"
_PRESENCE_PENALTY = "Penalize tokens that were already generated; 0 disables it.  [default: 0.0]"
_FREQUENCY_PENALTY = "Penalize tokens by how often they were already generated; 0 disables it.  [default: 0.0]"
_DRY_MULTIPLIER = "DRY: strength of the penalty on repeated phrases; 0 disables it.  [default: 0.0]"
_DRY_BASE = "DRY: factor by which the penalty grows with each token of the phrase.  [default: 1.75]"
_DRY_LENGTH = "DRY: penalize phrases from this many tokens on.  [default: 2]"
_DRY_LAST_N = "DRY: how many recent tokens to search for phrases.  [default: 1024]"
_DRY_BREAKER = 'DRY: text that ends a phrase; "" for none. Repeatable.  [default: newline, colon, double quote, *]'
_GRAMMAR = "Generate text that matches this Lark grammar, in llguidance's dialect."
_RULE = re.compile(r"^\s*start\b.*:", re.MULTILINE)  # every grammar has this rule, unlike the name of a file
_LOGPROBS = "Report the log-probability of each token, and of the N most likely tokens."

SAMPLING_OPTIONS = (
    _stopping("-n --max-tokens", int, "Generate at most N tokens.  [default: 256]", metavar="N"),
    _stopping("--stop", str, "Stop before this text. Repeatable.", multiple=True, metavar="TEXT"),
    _sampling("-t --temp --temperature temperature", float, _TEMPERATURE),
    _sampling("--seed", int, "Random seed. The same seed gives the same text.  [default: random]"),
    _sampling("--deterministic/--no-deterministic", bool, _DETERMINISTIC, default=None),
    _sampling("--top-k", int, "Sample from the K most likely tokens; 0 disables it.  [default: 0]"),
    _sampling("--top-p", float, _TOP_P),
    _sampling("--min-p", float, _MIN_P),
    _sampling("--typical-p", float, _TYPICAL_P),
    _sampling("--xtc-probability", float, _XTC_PROBABILITY),
    _sampling("--xtc-threshold", float, _XTC_THRESHOLD),
    _sampling("--logit-bias", str, _LOGIT_BIAS, multiple=True, metavar="ID=BIAS"),
    _repetition("--repetition-penalty", float, _REPETITION_PENALTY),
    _repetition("--repetition-context-size", int, _CONTEXT_SIZE),
    _repetition("--presence-penalty", float, _PRESENCE_PENALTY),
    _repetition("--frequency-penalty", float, _FREQUENCY_PENALTY),
    _repetition("--dry-multiplier", float, _DRY_MULTIPLIER),
    _repetition("--dry-base", float, _DRY_BASE),
    _repetition("--dry-allowed-length", int, _DRY_LENGTH),
    _repetition("--dry-penalty-last-n", int, _DRY_LAST_N),
    _repetition("--dry-sequence-breaker dry_sequence_breakers", str, _DRY_BREAKER, multiple=True, metavar="TEXT"),
    _constrained("--json-schema", str, "Generate JSON that conforms to this schema.", metavar="FILE|JSON"),
    _constrained("--regex", str, "Generate text that matches this regular expression as a whole.", metavar="REGEX"),
    _constrained("--choice", str, "Generate one of these texts. Repeatable.", multiple=True, metavar="TEXT"),
    _constrained("--grammar", str, _GRAMMAR, metavar="FILE|LARK"),
    option("Output", "--logprobs", int, _LOGPROBS, metavar="N"),
)

_MAX_KV_SIZE = "Limit the key-value cache to N tokens; the oldest are dropped.  [default: unlimited]"
_KV_KEEP = "With --max-kv-size: never drop the first N tokens (attention sinks).  [default: 4]"
_KV_BITS = (
    "Quantize the key-value cache to 8 or 4 bits; 8,4 or none,4 sets keys and values separately.  [default: none]"
)
_DRAFT_MODEL = "Speculative decoding: this small model proposes tokens. Faster, and the same text up to rounding."
_PROMPT_LOOKUP = (
    "Speculative decoding: propose what followed the same tokens earlier. Faster, and the same text up to rounding."
)

# What to try if a constrained text is incomplete, by its finish_reason.
CONSTRAINT_HINTS: dict[str | None, str] = {
    "length": "a larger --max-tokens",
    "stop": "a --stop that it can't contain, or none",
}


def load_model(model: str) -> LoadedModel:
    """Load a model by path, catalog name or hub id, with a spinner.

    A path is made absolute, because sessions and caches store it and may be used from another folder.
    """
    from mlxlm.checkpoint.download import fetch
    from mlxlm.generation import load

    fetch(model)  # before the spinner, since it has a progress bar
    with spinner(f"loading {one_line(model)}"):
        return load(os.path.abspath(model) if os.path.exists(model) else model)


def sampling_options(without: Collection[str] = ()) -> Callable[..., Any]:
    """Return a decorator that adds the sampling options to a command, which gets them as `options`: GenerationOptions.

    Args:
        without: Fields of GenerationOptions to leave out.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            from mlxlm.generation import GenerationOptions

            settings = {f.name: values.pop(f.name) for f in fields(GenerationOptions) if f.name not in without}
            settings = {name: value for name, value in settings.items() if value not in (None, ())}
            if (schema := settings.get("json_schema")) and not _is_json(schema):
                settings["json_schema"] = _read(schema, "a JSON file")
            if (grammar := settings.get("grammar")) and not _RULE.search(grammar):
                settings["grammar"] = _read(grammar, "a Lark grammar")
            with _as_usage_errors():
                options = GenerationOptions(**settings)
            return command(options=options, **values)

        decorated: Any = add_options(*SAMPLING_OPTIONS)(with_options)
        decorated.__click_params__ = [p for p in decorated.__click_params__ if p.name not in without]
        return decorated

    return decorate


def given_options(options: GenerationOptions) -> dict[str, Any]:
    """The options that are on the command line; a model's generation_config.json can have defaults of the others."""
    return {f.name: getattr(options, f.name) for f in fields(options) if is_given(f.name)}


def kv_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the key-value cache to a command, which gets them as `kv`, a KVOptions."""

    @functools.wraps(command)
    def with_options(*, max_kv_size: int | None, kv_keep: int | None, kv_bits: str | None, **values: Any) -> Any:
        if kv_keep is not None and max_kv_size is None:
            raise click.UsageError("--kv-keep needs --max-kv-size")
        from mlxlm.cache import KVOptions

        with _as_usage_errors():
            kv = KVOptions.of(size=max_kv_size, keep=kv_keep, bits=kv_bits)
        return command(kv=kv, **values)

    return add_options(
        _memory("--max-kv-size", int, _MAX_KV_SIZE, metavar="N"),
        _memory("--kv-keep", int, _KV_KEEP, metavar="N"),
        _memory("--kv-bits", str, _KV_BITS, metavar="BITS"),
    )(with_options)


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    try:
        yield
    except GenerationError as error:
        raise click.UsageError(str(error)) from error


def speculation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of speculative decoding to a command.

    The command gets `speculation`: None without speculative decoding, else a function that loads the draft model if
    there is one and returns a SpeculativeDecoder.
    """

    @functools.wraps(command)
    def with_options(*, draft_model: str | None, prompt_lookup: bool, **values: Any) -> Any:
        if draft_model is not None and prompt_lookup:
            raise click.UsageError("either --draft-model or --prompt-lookup")

        def make() -> SpeculativeDecoder:
            from mlxlm.generation.drafters import DraftModel, PromptLookup
            from mlxlm.generation.speculative import SpeculativeDecoder

            return SpeculativeDecoder(PromptLookup() if draft_model is None else DraftModel(load_model(draft_model)))

        return command(speculation=make if draft_model is not None or prompt_lookup else None, **values)

    return add_options(
        _memory("--draft-model", MODEL, _DRAFT_MODEL, metavar="MODEL"),
        _memory("--prompt-lookup", bool, _PROMPT_LOOKUP),
    )(with_options)


def _is_json(schema: str) -> bool:
    return schema.lstrip().startswith("{") or schema in ("true", "false")


def _read(path: str, expected: str) -> str:
    """Return the content of a file with a constraint."""
    from mlxlm.generation.option_checks import MAX_SCHEMA_CHARS
    from mlxlm.utils.bounded_reads import decode_utf8, read_bytes

    content = read_bytes(Path(path), MAX_SCHEMA_CHARS, GenerationError)
    return decode_utf8(content, path, GenerationError, expected, "utf-8-sig")
