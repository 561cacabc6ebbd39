"""`mlxlm prepare`: text into token shards."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.tokenizer import SOURCES_HELP
from mlxlm.units import human_bytes, human_seconds


@click.command(epilog=SOURCES_HELP)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCES...")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="PATH", help="Tokenizer folder or file.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the shards.")
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    help="Share of the documents (of the tokens, where there are few documents) held out.",
)
@click.option("--validation", multiple=True, metavar="FILE", help="Hold out this source instead. Repeatable.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the documents held out.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON object.")
def prepare(
    sources: tuple[str, ...],
    tokenizer_path: str,
    out: Path,
    validation_fraction: float,
    validation: tuple[str, ...],
    seed: int,
    as_json: bool,
) -> None:
    """Turn text into memory-mapped token shards for `mlxlm pretrain`.

    Rows of .jsonl files are {"text": "..."}, or conversations {"messages": [{"role": "user", "content": "..."},
    ...]}. Works in bounded memory; the folder appears complete or not at all.
    """
    from mlxlm.data import prepare as prepare_data
    from mlxlm.data import total_bytes
    from mlxlm.tokenizer import load

    tokenizer = load(tokenizer_path)
    started = time.perf_counter()
    with render.bytes_progress("Preparing", total_bytes([*sources, *validation])) as advance:
        manifest = prepare_data(
            sources,
            tokenizer,
            out,
            validation_fraction=validation_fraction,
            validation_paths=validation,
            seed=seed,
            progress=advance,
            stdin=click.get_binary_stream("stdin"),
        )
    seconds = time.perf_counter() - started
    if as_json:
        render.emit_json(manifest.to_dict())
        return
    splits = {"train": manifest.train, "validation": manifest.validation}
    rows = [(name, s.tokens, s.documents, human_bytes(s.bytes)) for name, s in splits.items()]
    render.print_result(render.table(rows, ("split", "tokens", "documents", "text")))
    speed = human_bytes((manifest.train.bytes + manifest.validation.bytes) / seconds)
    render.say(f"wrote {out} in {human_seconds(seconds)} ({speed}/s)")
    if manifest.split == "tail":
        render.say("few documents: validation is the end of the text")
