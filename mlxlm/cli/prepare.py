"""`mlxlm prepare`: text into token shards."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.run_options import ON_BAD_INPUT, print_skipped
from mlxlm.cli.tokenizer import SOURCES_HELP
from mlxlm.utils.formatting import human_bytes, human_seconds


@click.command(epilog=f"{SOURCES_HELP} With SOURCE=WEIGHT, training draws that share of its tokens from each.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCES...")
@click.option("--tokenizer", "tokenizer_path", required=True, metavar="PATH", help="Tokenizer folder or file.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the shards.")
@click.option("--text-column", metavar="NAME", help="Of tables and JSON lines.  [default: text, or messages]")
@click.option(
    "--dedup",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SIMILARITY",
    help="Leave out documents that repeat an earlier one, or whose runs of five words are as similar as this, "
    "case and punctuation apart (Jaccard, estimated to about 0.04; such as 0.8; 1: repetitions only). About 1 kB of "
    "memory for each document.",
)
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of the documents (of the text, where there are few documents) held out.  [default: 0.05]",
)
@click.option("--validation", multiple=True, metavar="FILE", help="Hold out this source instead. Repeatable.")
@click.option("--seed", type=int, help="Draws the documents held out.  [default: 0]")
@ON_BAD_INPUT
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON object.")
def prepare(
    sources: tuple[str, ...],
    tokenizer_path: str,
    out: Path,
    text_column: str | None,
    dedup: float | None,
    validation_fraction: float | None,
    validation: tuple[str, ...],
    seed: int | None,
    on_bad_input: str | None,
    as_json: bool,
) -> None:
    """Turn text into memory-mapped token shards for `mlxlm pretrain`.

    Rows of .jsonl files and of tables are {"text": "..."}, or conversations {"messages": [{"role": "user", "content":
    "..."}, ...]}. Works in bounded memory; the folder appears complete or not at all.
    """
    from mlxlm.data import DataOptions, parse_weighted_sources, total_bytes
    from mlxlm.data import prepare as prepare_data
    from mlxlm.tokenizer import load

    drawn = {"--validation-fraction": validation_fraction, "--seed": seed}
    if validation and (idle := [flag for flag, value in drawn.items() if value is not None]):
        raise click.UsageError(f"{' and '.join(idle)} would have no effect: --validation says what is held out")
    sources, weights = parse_weighted_sources(sources)
    tokenizer = load(tokenizer_path)
    started = time.perf_counter()
    with render.bytes_progress("Preparing", total_bytes([*sources, *validation])) as advance:
        manifest = prepare_data(
            DataOptions(
                sources,
                weights=weights,
                text_column=text_column,
                dedup=dedup,
                validation=validation,
                validation_fraction=0.05 if validation_fraction is None else validation_fraction,
                on_bad_input=on_bad_input or "stop",
                stdin=sys.stdin.buffer,
            ),
            tokenizer,
            out,
            seed=seed or 0,
            progress=advance,
        )
    seconds = time.perf_counter() - started
    print_skipped(manifest.skipped)
    if manifest.duplicates is not None:
        found = manifest.duplicates
        counts = f"{found.exact} exact and {found.near} near duplicates of {found.documents} documents"
        render.say(f"left out {counts} ({found.share:.1%}, {human_bytes(found.bytes)})")
    if as_json:
        render.emit_json(manifest.to_dict())
        return
    splits = {"train": manifest.train, "validation": manifest.validation}
    if len(manifest.parts) > 1:
        splits = {f"train: {p.name}, {p.weight:.1%}": p.train for p in manifest.parts} | splits
    rows = [(name, s.tokens, s.documents, human_bytes(s.bytes)) for name, s in splits.items()]
    render.print_result(render.table(rows, ("split", "tokens", "documents", "text")))
    speed = human_bytes((manifest.train.bytes + manifest.validation.bytes) / seconds)
    render.say(f"wrote {out} in {human_seconds(seconds)} ({speed}/s)")
    if manifest.split == "tail":
        render.say("few documents: validation is the end of the text")
