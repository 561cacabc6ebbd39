"""How many tokens a text has: counted where it is prepared, estimated from its size where it isn't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlm.errors import DataError

_MOST_BYTES = 4.5  # that a token of English stands for, however large the vocabulary


def bytes_per_token(vocab_size: int) -> float:
    """UTF-8 bytes of English that a token stands for: 2.1, 2.5, 3.3 and 3.6 measured on held-out WikiText-2 with
    byte-level vocabularies of 512, 1,024, 4,096 and 8,192 tokens, 0.4 more for each doubling; at most 4.5."""
    return min(_MOST_BYTES, 2.07 + 0.4 * math.log2(max(vocab_size, 256) / 512))


@dataclass(frozen=True)
class Corpus:
    """tokens of the training part; `counted`: in prepared shards, not estimated from `bytes` of text."""

    tokens: float
    bytes: int
    counted: bool


def corpus_of(paths: Sequence[str | Path], vocab_size: int) -> Corpus:
    """Of one prepared folder, or of texts as `mlxlm pretrain` takes them.

    Raises DataError for what can't be read, or has no size (a pipe).
    """
    from mlxlm.data import Manifest, total_bytes
    from mlxlm.data.manifest import is_prepared

    prepared = [Path(path) for path in paths if is_prepared(path)]
    if prepared and len(paths) > 1:
        raise DataError(f"{prepared[0]} is prepared data and can't be planned with other sources", "it alone")
    if prepared:
        train = Manifest.read(prepared[0]).train
        return Corpus(train.tokens, train.bytes, True)
    size = total_bytes(list(map(str, paths)))
    if size is None:
        raise DataError("a text from a pipe has no size that could be planned with", "--tokens, or a file")
    return Corpus(size / bytes_per_token(vocab_size), size, False)
