"""What `chat`, `generate` and `serve` share: loading a model; options of sampling, the cache, speculative decoding."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from mlxlm import generation
from mlxlm.cache.options import KVOptions
from mlxlm.checkpoint.download import fetch
from mlxlm.cli.distributed import current_workers
from mlxlm.cli.options import MODEL, add_options, field_option, is_given, option
from mlxlm.cli.render import spinner
from mlxlm.config.option import declaration, options_of
from mlxlm.generation.options import MAX_SCHEMA_CHARS, GenerationOptions
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import GenerationError, one_line

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder

# None without speculative decoding, else a function that loads the draft model, if there is one.
Speculation: TypeAlias = "Callable[[], SpeculativeDecoder] | None"

_SECTIONS = ("Stopping", "Sampling", "Repetition penalties", "Constrained output", "Output")
_memory = functools.partial(option, "Memory and speed")
_RULE = re.compile(r"^\s*start\b.*:", re.MULTILINE)  # every grammar has this rule, unlike the name of a file
_DRAFT_MODEL = (
    "Speculative decoding: this small model, or head that mlxlm draft has trained, proposes tokens. Faster, and the "
    "same text up to rounding."
)
_PROMPT_LOOKUP = (
    "Speculative decoding: propose what followed the same tokens earlier. Faster, and the same text up to rounding."
)

# What to try if a constrained text is incomplete, by its finish_reason.
CONSTRAINT_HINTS: dict[str | None, str] = {
    "length": "a larger --max-tokens",
    "stop": "a --stop that it can't contain, or none",
}


def load_model(model: str, adapter: Path | None = None) -> generation.LoadedModel:
    """Load a model by path, catalog name or hub id, with a spinner; `adapter`: see `load`.

    A path is made absolute, because sessions and caches store it and may be used from another folder.
    """
    fetch(model)  # before the spinner, since it has a progress bar
    path = os.path.abspath(model) if os.path.exists(model) else model
    with spinner(f"loading {one_line(model)}"):
        if (workers := current_workers()) is None:
            return generation.load(path, adapter)
        from mlxlm.generation.distributed import load_split

        return load_split(workers, path, adapter)


def sampling_options(without: Collection[str] = ()) -> Callable[..., Any]:
    """Return a decorator that adds the sampling options to a command, which gets them as `options`: GenerationOptions.

    Args:
        without: Fields of GenerationOptions to leave out.
    """
    added = {name: field for name, field in options_of(GenerationOptions).items() if name not in without}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            given = {name: value for name in added if (value := values.pop(name)) not in (None, ())}
            if (schema := given.get("json_schema")) and not _is_json(schema):
                given["json_schema"] = _read(schema, "a JSON file")
            if (grammar := given.get("grammar")) and not _RULE.search(grammar):
                given["grammar"] = _read(grammar, "a Lark grammar")
            with _as_usage_errors():
                options = GenerationOptions(**given)
            return command(options=options, **values)

        in_order = sorted(added.values(), key=lambda field: _SECTIONS.index(declaration(field).section))
        return add_options(*map(field_option, in_order))(with_options)

    return decorate


def given_options(options: GenerationOptions) -> dict[str, Any]:
    """The options that are on the command line; a model's generation_config.json can have defaults of the others."""
    return {f.name: getattr(options, f.name) for f in fields(options) if is_given(f.name)}


def kv_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the key-value cache to a command, which gets them as `kv`, a KVOptions."""

    @functools.wraps(command)
    def with_options(*, size: int | None, keep: int | None, key_bits: str | None, **values: Any) -> Any:
        if keep is not None and size is None:
            raise click.UsageError("--kv-keep needs --max-kv-size")
        with _as_usage_errors():
            kv = KVOptions.of(size=size, keep=keep, bits=key_bits)
        return command(kv=kv, **values)

    options = options_of(KVOptions)
    bits = field_option(options["key_bits"], kind=str)  # "8,4" is keys, values
    return add_options(field_option(options["size"]), field_option(options["keep"]), bits)(with_options)


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    try:
        yield
    except GenerationError as error:
        raise click.UsageError(str(error)) from error


def speculation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of speculative decoding to a command.

    The command gets `speculation`, a Speculation.
    """

    @functools.wraps(command)
    def with_options(*, draft_model: str | None, prompt_lookup: bool, **values: Any) -> Any:
        def make() -> SpeculativeDecoder:
            from mlxlm.generation.draft_head import DraftHead, is_draft_head
            from mlxlm.generation.drafters import DraftModel, PromptLookup
            from mlxlm.generation.speculative import SpeculativeDecoder

            if draft_model is None:
                return SpeculativeDecoder(PromptLookup())
            is_head = is_draft_head(draft_model)
            drafter = DraftHead.load(draft_model) if is_head else DraftModel(load_model(draft_model))
            return SpeculativeDecoder(PromptLookup(), drafter)

        return command(speculation=make if draft_model is not None or prompt_lookup else None, **values)

    return add_options(
        _memory("--draft-model", MODEL, _DRAFT_MODEL, metavar="MODEL", advanced=True),
        _memory("--prompt-lookup", bool, _PROMPT_LOOKUP, advanced=True),
    )(with_options)


def _is_json(schema: str) -> bool:
    return schema.lstrip().startswith("{") or schema in ("true", "false")


def _read(path: str, expected: str) -> str:
    """Return the content of a file with a constraint."""
    content = read_bytes(Path(path), MAX_SCHEMA_CHARS, GenerationError)
    return decode_utf8(content, path, GenerationError, expected, "utf-8-sig")
