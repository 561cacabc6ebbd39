"""`mlxlm tokenizer`: train, encode, decode, info."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import BinaryIO

import click

from mlxlm.cli import render
from mlxlm.cli.run_options import ON_BAD_INPUT, print_skipped
from mlxlm.tokenizer import TOKENIZER_TYPES, load, tokenizer_stats, train
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import TokenizerError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

SOURCES_HELP = (
    "Sources: text files, .jsonl files, both also as .gz or .zst, .parquet and .arrow files (pip install "
    "'mlxlm[data]'), folders of them, folders of Hugging Face's save_to_disk, or - for stdin."
)


@click.group()
def tokenizer() -> None:
    """Train, inspect and apply tokenizers.

    PATH is a folder with tokenizer files, or one of them: tokenizer.json, tokenizer.model (SentencePiece) or
    vocab.json (with merges.txt beside it).
    """


@tokenizer.command("train", epilog=SOURCES_HELP)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--vocab-size", type=click.IntRange(min=1), required=True, help="Tokens, special ones included.")
@click.option(
    "--tokenizer-type",
    type=click.Choice(TOKENIZER_TYPES),
    default=TOKENIZER_TYPES[0],
    show_default=True,
    help="Kind of BPE.",
)
@click.option("--text-column", metavar="NAME", help="Of tables and JSON lines.  [default: text, or messages]")
@ON_BAD_INPUT
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for its files.")
def train_command(
    files: tuple[str, ...],
    vocab_size: int,
    tokenizer_type: str,
    text_column: str | None,
    on_bad_input: str | None,
    out: Path,
) -> None:
    """Learn a vocabulary from text.

    byte-level is the kind of GPT-2 and Llama 3, sentencepiece (BPE with byte fallback) that of Llama 2.
    """
    from mlxlm.data import BadInput, texts, total_bytes

    bad = BadInput(on_bad_input or "stop")
    started = time.perf_counter()
    with atomic_new_folder(out, TokenizerError) as folder:
        with render.bytes_progress("Training", total_bytes(files)) as advance:
            source = texts(files, stdin=_stdin(), advance=advance, text_column=text_column, on_bad=bad)
            trained = train(source, vocab_size, tokenizer_type)
        trained.save(folder)
    seconds = human_seconds(time.perf_counter() - started)
    print_skipped(bad.skipped)
    render.say(f"trained a {tokenizer_type} tokenizer of {trained.vocab_size} tokens in {seconds}")
    render.result(str(out))


@tokenizer.command()
@click.argument("path")
@click.option("--text", help="Text to encode.  [default: stdin]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--add-special-tokens/--no-add-special-tokens",
    default=True,
    help="Add BOS and the like, as for a model.  [default: yes]",
)
def encode(path: str, text: str | None, as_json: bool, add_special_tokens: bool) -> None:
    """Print the token ids of a text."""
    loaded = load(path)
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
    """Read token ids from stdin, print exactly their text (and no line end after it)."""
    loaded = load(path)
    ids = []
    for word in _stdin().read().split():
        if not word.isdigit() or len(word) > 10:
            shown = word[:20].decode("utf-8", "replace")
            raise TokenizerError(f"'{shown}' is not a token id", "numbers with spaces between them")
        ids.append(int(word))
        if ids[-1] >= loaded.vocab_size:
            size = loaded.vocab_size
            raise TokenizerError(f"{ids[-1]} is not one of the tokenizer's {size} ids", f"ids from 0 to {size - 1}")
    out = click.get_binary_stream("stdout")
    out.write(loaded.decode(ids).encode("utf-8"))
    out.flush()


@tokenizer.command(epilog=SOURCES_HELP)
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--text", "texts_path", metavar="FILE", help="Also measure the tokenizer on this source of text.")
def info(path: str, as_json: bool, texts_path: str | None) -> None:
    """Show what a tokenizer is, and how well it fits a text."""
    loaded = load(path)
    facts = {
        "tokenizer_type": loaded.tokenizer_type,
        "vocab_size": loaded.vocab_size,
        "special_tokens": loaded.special_tokens,
        "bos_id": loaded.bos_id,
        "eos_id": loaded.eos_id,
        "pad_id": loaded.pad_id,
        "unk_id": loaded.unk_id,
        "chat_template": loaded.chat_template is not None,
        "fingerprint": loaded.fingerprint,
    }
    if texts_path is not None:
        from mlxlm.data import texts, total_bytes

        with render.bytes_progress("Encoding", total_bytes([texts_path])) as advance:
            measured = tokenizer_stats(loaded, texts([texts_path], stdin=_stdin(), advance=advance))
        facts["text"] = dataclasses.asdict(measured)
    if as_json:
        render.emit_json(facts)
        return
    special = ", ".join(f"{token} {i}" for token, i in list(loaded.special_tokens.items())[:12])
    more = len(loaded.special_tokens) - 12
    rows = [
        ("tokenizer_type", loaded.tokenizer_type),
        ("vocabulary", f"{loaded.vocab_size} tokens"),
        ("special tokens", (special or "none") + (f", and {more} more" if more > 0 else "")),
        ("chat template", "yes" if loaded.chat_template is not None else "no"),
        ("fingerprint", loaded.fingerprint),
    ]
    if texts_path is not None:
        rows += [
            ("text", f"{human_bytes(measured.bytes)}, {measured.tokens} tokens"),
            ("bytes per token", f"{measured.bytes_per_token:.3f}"),
            ("speed", f"{human_count(measured.tokens_per_second)} tokens/s"),
            ("vocabulary used", f"{100 * measured.vocabulary_used:.1f}%"),
        ]
    render.print_result(render.table(rows))


def _stdin() -> BinaryIO:
    return click.get_binary_stream("stdin")
