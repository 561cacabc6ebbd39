"""`mlxlm tokenizer`: train and apply tokenizers."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from mlxlm.checkpoint import open_tokenizer
from mlxlm.cli import render
from mlxlm.cli.options import PATH, SOURCES_HELP, SectionedCommand, data_option, given_values, json_option, option
from mlxlm.cli.training_options import default_max_seq_length, print_skipped
from mlxlm.data.options import DataOptions
from mlxlm.data.sources import read_texts, total_bytes
from mlxlm.data.text import BadInput
from mlxlm.tokenizer import TOKENIZER_TYPES, tokenizer_stats, train
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import TokenizerError
from mlxlm.utils.files import atomic_new_folder, check_not_exists, unused_path
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds, printable

_NEARLY_EQUAL = 0.005  # of the bits per byte: the scaling law is less exact than that
_SIZES = "Vocabulary sizes. 2k is 2048, and ... doubles up to the next size."
_MINUTES = (
    "Training time that the sizes are compared for.  [default: that of 20 tokens per parameter, for the middle size]"
)
_PICTURE = "New file for the picture, .png, .svg or .pdf.  [default: tokenizer-report.png]"
_TOKENIZER_TYPE = "BPE on bytes as in GPT-2 and Llama 3, or on characters with byte fallback as in Llama 2."


@click.group()
def tokenizer() -> None:
    """Train, inspect and apply tokenizers.

    PATH is a folder with a tokenizer, one of its files, which are tokenizer.json, tokenizer.model (SentencePiece) and
    vocab.json (next to merges.txt), or a name of mlxlm models.
    """


@tokenizer.command("train", cls=SectionedCommand, epilog=SOURCES_HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@option("Tokenizer", "--out", PATH, "New folder for the tokenizer.", required=True)
@option("Tokenizer", "--vocab-size", click.IntRange(1), "Vocabulary size, with special tokens.", required=True)
@option("Tokenizer", "--tokenizer-type", TOKENIZER_TYPES, _TOKENIZER_TYPE, default=TOKENIZER_TYPES[0])
@data_option("text_column", "Text")
@data_option("on_bad_input", "Text")
def train_command(files: tuple[str, ...], out: Path, vocab_size: int, tokenizer_type: str, **options: Any) -> None:
    """Train a tokenizer on text."""
    bad = BadInput(options["on_bad_input"] or "stop")
    start = time.perf_counter()
    with atomic_new_folder(out, TokenizerError) as folder:
        with render.bytes_progress("Training", total_bytes(files)) as advance:
            how = {"text_column": options["text_column"], "on_bad": bad}
            source = read_texts(files, stdin=_stdin(), advance=advance, **how)
            trained = train(source, vocab_size, tokenizer_type)
        trained.save(folder)
    seconds = human_seconds(time.perf_counter() - start)
    print_skipped(bad.reasons.values())
    render.say(f"trained a {tokenizer_type} tokenizer of {trained.vocab_size} tokens in {seconds}")
    render.result(str(out))


@tokenizer.command()
@click.argument("path")
@click.option("--text", help="Text to encode.  [default: standard input]")
@json_option
@click.option(
    "--add-special-tokens/--no-add-special-tokens",
    default=True,
    show_default=True,
    help="Add special tokens such as BOS, as for a model.",
)
def encode(path: str, text: str | None, as_json: bool, add_special_tokens: bool) -> None:
    """Print the token ids of a text."""
    loaded = open_tokenizer(path)
    if text is None:
        text = decode_utf8(_stdin().read(), "stdin", TokenizerError, "text as UTF-8")
    ids = loaded.encode(text, add_special_tokens=add_special_tokens)
    if as_json:
        render.emit_json({"ids": ids, "count": len(ids)})
    else:
        render.result(" ".join(map(str, ids)))


@tokenizer.command()
@click.argument("path")
def decode(path: str) -> None:
    """Read token ids from standard input, and print their text. No newline is added."""
    loaded = open_tokenizer(path)
    words = _stdin().read().split()
    if wrong := next((word for word in words if not word.isdigit() or len(word) > 10), None):
        raise TokenizerError(
            f"'{wrong[:20].decode('utf-8', 'replace')}' is not a token id", "numbers with spaces between them"
        )
    ids, size = list(map(int, words)), loaded.vocab_size
    if (highest := max(ids, default=0)) >= size:
        raise TokenizerError(f"{highest} is not one of the tokenizer's {size} ids", f"ids from 0 to {size - 1}")
    out = sys.stdout.buffer
    text = loaded.decode(ids)
    out.write((printable(text) if out.isatty() else text).encode("utf-8"))
    out.flush()


@tokenizer.command(cls=SectionedCommand, epilog=SOURCES_HELP)
@click.argument("path")
@json_option
@click.option("--eval-text", metavar="FILE", help="Also measure how well the tokenizer compresses this text.")
def info(path: str, as_json: bool, eval_text: str | None) -> None:
    """Describe a tokenizer, and show how well it compresses a text."""
    loaded = open_tokenizer(path)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    names = ("tokenizer_type", "vocab_size", "special_tokens", *ids, "chat_template", "fingerprint")
    facts = {name: getattr(loaded, name) for name in names}
    facts["chat_template"] = loaded.chat_template is not None
    if eval_text is not None:
        with render.bytes_progress("Encoding", total_bytes([eval_text])) as advance:
            measured = tokenizer_stats(loaded, read_texts([eval_text], stdin=_stdin(), advance=advance))
        facts["text"] = dataclasses.asdict(measured)
    if as_json:
        render.emit_json(facts)
        return
    special = ", ".join(f"{token} {i}" for token, i in list(loaded.special_tokens.items())[:12])
    more = len(loaded.special_tokens) - 12
    rows = [
        ("tokenizer type", loaded.tokenizer_type),
        ("vocabulary", f"{loaded.vocab_size} tokens"),
        ("special tokens", (special or "none") + (f", and {more} more" if more > 0 else "")),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        ("fingerprint", loaded.fingerprint),
    ]
    if eval_text is not None:
        rows += [
            ("text", f"{human_bytes(measured.bytes)}, {measured.tokens} tokens"),
            ("bytes per token", f"{measured.bytes_per_token:.3f}"),
            ("speed", f"{human_count(measured.tokens_per_second)} tokens/s"),
            ("vocabulary used", f"{100 * measured.vocabulary_used:.1f}%"),
        ]
    render.print_table(rows)


class _Sizes(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions
    """Vocabulary sizes: 512,1k,2k or 512,...,32k."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Parse them."""
        sizes: list[int] = []
        doubles = False
        for part in str(value).lower().replace("…", "...").split(","):
            match = re.fullmatch(r"(\d{1,7})(k?)", part.strip())
            if part.strip() == "..." and sizes:
                doubles = True
                continue
            if match is None:
                self.fail(f"{value!r} are not vocabulary sizes (try: 512,1k,2k or 512,...,32k)", param, ctx)
            size = int(match[1]) * (1024 if match[2] else 1)
            while doubles and 2 * sizes[-1] < size:
                sizes.append(2 * sizes[-1])
            doubles = False
            sizes.append(size)
        return sizes


@tokenizer.command(cls=SectionedCommand, epilog=SOURCES_HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@option("Tokenizer", "--sizes", _Sizes(), _SIZES, default="512,...,32k")
@option("Model", "--preset", str, "Model size; see mlxlm models presets.", default="1m")
@option("Model", "--minutes", click.FloatRange(0, min_open=True), _MINUTES)
@option("Model", "--probe with_probe", bool, "Measure the time of training steps here, as mlxlm plan --probe does.")
@option("Output", "--out", PATH, _PICTURE)
@data_option("text_column", "Text")
@data_option("on_bad_input", "Text")
@json_option
def report(
    files: tuple[str, ...],
    sizes: list[int],
    preset: str,
    minutes: float | None,
    with_probe: bool,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Recommend a vocabulary size for a text, a model and a training time.

    For each size, this shows how well the tokenizer compresses held-out text, and what the model costs: parameters,
    operations per byte of text, and the time for a pass over the text on this machine. Expected bits per byte after
    the same training time are estimates by a scaling law (Hoffmann et al. 2022), compared with the best size.
    """
    import mlxlm.plan as planner
    from mlxlm.cli.plan import probe
    from mlxlm.families import load_preset
    from mlxlm.plan.vocabulary import compare_vocabularies, measure_compression, plot_vocabularies

    out = out or unused_path(Path("tokenizer-report.png"))
    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--out is {out}, whose suffix names no picture format (try: {out.with_suffix('.png')})")
    check_not_exists(out, TokenizerError, "another --out")
    config = load_preset(preset)
    with render.spinner("measuring this machine"):
        machine = planner.this_machine()
    data = DataOptions(files, **given_values(options))
    total = total_bytes(files)
    with render.bytes_progress(f"Training a tokenizer of up to {max(sizes)} tokens", total) as advance:
        compression = measure_compression(data, sizes, advance)
    length = default_max_seq_length(config)
    plans = [
        planner.plan(config.with_changes(vocab_size=size), machine=machine, max_seq_length=length)
        for size in compression.bytes_per_token
    ]
    plans = [probe(plan) for plan in plans] if with_probe else plans
    middle = plans[len(plans) // 2]
    seconds = 60 * minutes if minutes else (middle.measured_duration or middle.duration).seconds
    rows, best = compare_vocabularies(compression, plans, seconds)
    plot_vocabularies(rows, best, f"{preset}, trained for {human_seconds(seconds)} here", out)
    if as_json:
        best_size = {"recommended": best.vocab_size, "seconds": seconds, "train_bytes": compression.train_bytes}
        sizes_json = [dataclasses.asdict(row) for row in rows]
        render.emit_json({**best_size, "supported": compression.supported, "sizes": sizes_json, "picture": str(out)})
        return
    render.print_table(
        [
            (
                row.vocab_size,
                f"{row.bytes_per_token:.2f}",
                human_count(row.parameters),
                human_count(row.flops_per_byte),
                human_seconds(row.seconds_per_epoch),
                f"{row.epochs:.3g}",
                "lowest" if row is best else f"+{row.excess_bits:.1%}",
            )
            for row in rows
        ],
        (
            *("vocabulary", "bytes/token", "parameters", "FLOPs/byte", "time of a pass"),
            *(f"passes in {human_seconds(seconds)}", "expected bits/byte"),
        ),
    )
    if compression.supported < max(sizes):
        render.say(f"The text supports a vocabulary of {compression.supported:,}: larger sizes are left out.")
    how = "measured" if with_probe else f"as planned by mlxlm plan, at {100 * middle.duration.mfu:.0f}% utilization"
    render.say(f"Time is {how}. Expected bits per byte are an estimate by the scaling law of Hoffmann et al. 2022.")
    equal = [f"{row.vocab_size:,}" for row in rows if row is not best and row.excess_bits <= _NEARLY_EQUAL]
    near = f"; {' and '.join(equal)} should do about as well" if equal else ""
    render.result(f"Take {best.vocab_size:,} tokens for {human_seconds(seconds)} of training {preset} here{near}.")
    command = f"mlxlm tokenizer train {shlex.join(files)} --vocab-size {best.vocab_size} --out tokenizer"
    render.say(f"{command}\nThe picture is in {out}")


def _stdin() -> BinaryIO:
    return sys.stdin.buffer
