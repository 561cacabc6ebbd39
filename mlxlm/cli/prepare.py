"""`mlxlm prepare`: tokenize text into shards, or write a built-in corpus."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from mlxlm import checkpoint
from mlxlm.cli import render
from mlxlm.cli.options import (
    PATH,
    SIZE,
    SOURCES_HELP,
    SectionedCommand,
    data_option,
    given_flags,
    given_values,
    json_option,
    option,
    reject_unused_options,
)
from mlxlm.cli.training_options import print_read
from mlxlm.data.manifest import Manifest
from mlxlm.data.options import DataOptions, parse_weighted_sources
from mlxlm.data.small_world.corpus import write_small_world
from mlxlm.data.sources import total_bytes
from mlxlm.utils.formatting import human_bytes, human_seconds

SMALL_WORLD_BYTES = 5_000_000  # more than two minutes of training read
_BUILTIN = "Write this corpus to --out, a new .jsonl file of conversations, instead of shards."
_SEED = "Random seed that chooses the held-out documents, or the conversations of small-world.  [default: 0]"
_VALIDATION_FRACTION = (
    "Fraction of the documents to hold out; of the text, if there are few documents.  [default: 0.05]"
)


@click.command(cls=SectionedCommand, epilog=f"{SOURCES_HELP} SOURCE=WEIGHT sets the share of training tokens.")
@click.argument("sources", nargs=-1, metavar="[SOURCES]...")
@option("Output", "--tokenizer", str, "Path or model name of a tokenizer.", metavar="PATH")
@option("Output", "--out", PATH, "New folder for the shards.", required=True)
@data_option("text_column", "Text")
@data_option("on_bad_input", "Text")
@data_option("dedup", "Text", kind=click.FloatRange(0, 1, min_open=True))
@option("Validation", "--validation-fraction", click.FloatRange(0, 1, max_open=True), _VALIDATION_FRACTION)
@option("Validation", "--validation", str, "Hold out this source instead. Repeatable.", multiple=True, metavar="FILE")
@option("Validation", "--seed", int, _SEED)
@option("Built-in corpus", "--builtin", ["small-world"], _BUILTIN)
@option("Built-in corpus", "--size", SIZE, "Size of small-world.  [default: 5MB]", metavar="SIZE")
@json_option
def prepare(
    sources: tuple[str, ...], tokenizer: str | None, out: Path, builtin: str | None, as_json: bool, **options: Any
) -> None:
    """Tokenize text into memory-mapped shards for `mlxlm pretrain`.

    A row of a .jsonl file or table is {"text": "..."}, or a conversation {"messages": [{"role": "user", "content":
    "..."}, ...]}. Sources can be larger than memory.

    The corpus small-world has conversations in simple English for small models: stories, questions about them, sums,
    sorting, spelling and opposites. A tenth of all combinations of words is held out for `mlxlm evaluate MODEL
    --small-world`.
    """
    size = options.pop("size")
    if builtin is not None:
        unused = [*(["SOURCES"] if sources else []), *given_flags({"tokenizer", "as_json", *options} - {"seed"})]
        if unused:
            raise click.UsageError(f"{unused[0]} would have no effect: --builtin writes text")
        size = size or SMALL_WORLD_BYTES
        with render.bytes_progress("Writing", size) as advance:
            write_small_world(out, size, options["seed"] or 0, advance)
        render.say(f"wrote {human_bytes(out.stat().st_size)}")
        render.result(str(out))
        return
    if not sources or tokenizer is None:
        raise click.UsageError("give SOURCES and --tokenizer, or --builtin")
    reject_unused_options({"size": size}, (True, ["size"], "--builtin is not given"))
    from mlxlm.data import prepare as prepare_data

    validation = options.pop("validation")
    reject_unused_options(options, (validation, ["validation_fraction", "seed"], "--validation says what is held out"))
    seed = options.pop("seed")
    paths, weights = parse_weighted_sources(sources)
    loaded = checkpoint.open_tokenizer(tokenizer)
    start = time.perf_counter()
    with render.bytes_progress("Preparing", total_bytes([*paths, *validation])) as advance:
        data = DataOptions(paths, weights, validation=validation, stdin=sys.stdin.buffer, **given_values(options))
        manifest = prepare_data(data, loaded, out, seed=seed or 0, progress=advance)
    seconds = time.perf_counter() - start
    print_read(manifest)
    if (duplicates := manifest.dedup) is not None:
        counts = f"{duplicates.exact} exact and {duplicates.near} near duplicates of {duplicates.documents} documents"
        render.say(f"dropped {counts} ({duplicates.fraction:.1%}, {human_bytes(duplicates.bytes)})")
    if as_json:
        render.emit_json(manifest.to_dict())
        return
    render.print_table(_rows(manifest), ("split", "tokens", "documents", "text"))
    speed = human_bytes((manifest.train.bytes + manifest.validation.bytes) / seconds)
    render.say(f"wrote {out} in {human_seconds(seconds)} ({speed}/s)")
    if manifest.validation_split == "blocks":
        render.say("there are few documents, so blocks spread over the text are held out for validation")


def _rows(manifest: Manifest) -> list[tuple[str, int, int, str]]:
    splits = {"train": manifest.train, "validation": manifest.validation}
    if len(manifest.parts) > 1:
        splits = {f"train: {p.name}, {p.weight:.1%}": p.train for p in manifest.parts} | splits
    return [(name, s.tokens, s.documents, human_bytes(s.bytes)) for name, s in splits.items()]
