"""`mlxlm tokenizer`: train and apply tokenizers."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from mlxlm.checkpoint import open_tokenizer
from mlxlm.cli import render
from mlxlm.cli.options import PATH, SOURCES_HELP, SectionedCommand, data_option, json_option, option
from mlxlm.cli.training_options import print_skipped
from mlxlm.data.sources import read_texts, total_bytes
from mlxlm.data.text import BadInput
from mlxlm.tokenizer import TOKENIZER_TYPES, tokenizer_stats, train
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import TokenizerError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds, printable

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
    ids = []
    for word in _stdin().read().split():
        if not word.isdigit() or len(word) > 10:
            shown = word[:20].decode("utf-8", "replace")
            raise TokenizerError(f"'{shown}' is not a token id", "numbers with spaces between them")
        ids.append(int(word))
        if ids[-1] >= loaded.vocab_size:
            size = loaded.vocab_size
            raise TokenizerError(f"{ids[-1]} is not one of the tokenizer's {size} ids", f"ids from 0 to {size - 1}")
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


def _stdin() -> BinaryIO:
    return sys.stdin.buffer
