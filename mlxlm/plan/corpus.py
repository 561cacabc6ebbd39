"""How many tokens a text has: counted where it is prepared, estimated from its bytes where it isn't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlm.data.bad_input import OnBad, raise_error
from mlxlm.utils.errors import DataError

_MOST_BYTES = 4.5  # that a token of English stands for, however large the vocabulary
_PLAIN = (".txt", ".md")  # whose bytes are the text
_SAMPLE = 1 << 22  # bytes of text that are read of another source


def bytes_per_token(vocab_size: int) -> float:
    """UTF-8 bytes of English that a token stands for: 2.1, 2.5, 3.3 and 3.6 measured on held-out WikiText-2 with
    byte-level vocabularies of 512, 1,024, 4,096 and 8,192 tokens, 0.4 more for each doubling; at most 4.5."""
    return min(_MOST_BYTES, 2.07 + 0.4 * math.log2(max(vocab_size, 256) / 512))


@dataclass(frozen=True)
class Corpus:
    """tokens of the training part, where it is prepared; `counted`: in prepared shards, not estimated from `bytes` of
    all the text. These are estimated themselves where the text is compressed, or in rows."""

    tokens: float
    bytes: int
    counted: bool


def count_corpus(
    sources: Sequence[str | Path], vocab_size: int, text_column: str | None = None, on_bad: OnBad = raise_error
) -> Corpus:
    """Of one prepared folder, or of texts as `mlxlm pretrain` takes them; how much it is doesn't depend on weights.

    Raises DataError for what can't be read, or has no size (a pipe).
    """
    from mlxlm.data import Manifest, parse_weighted_sources
    from mlxlm.data.manifest import is_prepared

    paths, _ = parse_weighted_sources(sources)
    prepared = [Path(path) for path in paths if is_prepared(path)]
    if prepared and len(paths) > 1:
        raise DataError(f"{prepared[0]} is prepared data and can't be planned with other sources", "it alone")
    if prepared:
        train = Manifest.read(prepared[0]).train
        if not train.tokens:
            raise DataError(f"{prepared[0]} has no tokens to train on", "mlxlm prepare on a longer text")
        return Corpus(train.tokens, train.bytes, True)
    size = round(sum(_text_bytes(path, text_column, on_bad) for path in paths))
    return Corpus(size / bytes_per_token(vocab_size), size, False)


def _text_bytes(path: str | Path, text_column: str | None, on_bad: OnBad) -> float:
    """UTF-8 bytes of a source's text: the bytes of its files, times those of text that the first of them hold each."""
    from mlxlm.data import read_texts, total_bytes

    size = total_bytes([path])
    if not size:
        raise DataError(f"{path} has no size that could be planned with", "--tokens, or a file with some text")
    if Path(path).suffix.lower() in _PLAIN:
        return size
    read = text = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count

    for piece in read_texts([path], advance=advance, text_column=text_column, on_bad=on_bad):
        text += len(piece.encode())
        if text >= _SAMPLE and read:
            break
    if not text:
        raise DataError(f"{path} has no text", "a file with some text")
    return size * text / read
