"""Count the tokens of prepared data, or estimate those of a text from its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlm.utils.errors import DataError

_MAX_BYTES_PER_TOKEN = 4.5  # of English text, however large the vocabulary
_PLAIN_TEXT = (".txt", ".md")
_SAMPLE_BYTES = 1 << 22  # of text, read from a source of another format


def bytes_per_token(vocab_size: int) -> float:
    """Estimate the UTF-8 bytes of English text per token.

    2.1, 2.5, 3.3 and 3.6 were measured on held-out WikiText-2 with byte-level vocabularies of 512, 1,024, 4,096 and
    8,192 tokens: 0.4 more for each doubling. At most 4.5.
    """
    return min(_MAX_BYTES_PER_TOKEN, 2.07 + 0.4 * math.log2(max(vocab_size, 256) / 512))


@dataclass(frozen=True)
class Corpus:
    """The size of a training text.

    Attributes:
        tokens: Tokens of the training split.
        bytes: UTF-8 bytes of the text; an estimate for compressed files and tables.
        counted: Whether the tokens were counted in prepared shards, instead of estimated from `bytes`.
    """

    tokens: float
    bytes: int
    counted: bool


def count_corpus(sources: Sequence[str | Path], vocab_size: int, text_column: str | None = None) -> Corpus:
    """Count the tokens of a prepared folder, or estimate those of texts.

    Args:
        sources: One prepared folder, or text sources as `mlxlm pretrain` takes them. Source weights are ignored.
        vocab_size: Of the tokenizer, for the estimate.
        text_column: Column of tables and JSON lines.

    Raises:
        DataError: A source can't be read, or has no size (a pipe).
    """
    from mlxlm.data import Manifest, parse_weighted_sources
    from mlxlm.data.manifest import prepared_source

    paths, _ = parse_weighted_sources(sources)
    if prepared := prepared_source(paths):
        train = Manifest.read(prepared).train
        if not train.tokens:
            raise DataError(f"{prepared} has no tokens to train on", "mlxlm prepare on a longer text")
        return Corpus(train.tokens, train.bytes, True)
    size = round(sum(_text_bytes(path, text_column) for path in paths))
    return Corpus(size / bytes_per_token(vocab_size), size, False)


def _text_bytes(path: str | Path, text_column: str | None) -> float:
    """Return the UTF-8 bytes of a source's text: its file size times the share of text in the first part."""
    from mlxlm.data import read_texts, total_bytes

    size = total_bytes([path])
    if not size:
        raise DataError(f"{path} has no size to plan with", "`tokens`, or a file with some text")
    if Path(path).suffix.lower() in _PLAIN_TEXT and text_column is None:
        return size
    read = text = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count

    for piece in read_texts([path], advance=advance, text_column=text_column):
        text += len(piece.encode())
        if text >= _SAMPLE_BYTES and read:
            break
    if not text:
        raise DataError(f"{path} has no text", "a file with some text")
    return size * text / read
