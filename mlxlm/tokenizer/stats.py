"""Compression and speed of a tokenizer on a text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from mlxlm.tokenizer.tokenizer import Tokenizer
from mlxlm.utils.errors import TokenizerError

_BATCH_CHARACTERS = 1 << 19


@dataclass
class TokenizerStats:
    """Statistics of a tokenizer on a text, without special tokens.

    Attributes:
        bytes: Bytes of the text in UTF-8.
        tokens: Number of tokens.
        bytes_per_token: Compression; higher is better at the same vocabulary size.
        tokens_per_second: Speed of encoding in batches.
        vocabulary_used: Fraction of all ids that occur.
    """

    bytes: int
    tokens: int
    bytes_per_token: float
    tokens_per_second: float
    vocabulary_used: float


def tokenizer_stats(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerStats:
    """Measure a tokenizer on `texts`, in bounded memory.

    Raises:
        TokenizerError: There is no text.
    """
    used = bytearray(tokenizer.vocab_size)
    n_bytes = tokens = size = 0
    seconds = 0.0
    batch: list[str] = []

    def encode() -> None:
        nonlocal tokens, seconds
        started = time.perf_counter()
        encoded = tokenizer.encode_batch(batch)
        seconds += time.perf_counter() - started
        for ids in encoded:
            tokens += len(ids)
            for token in set(ids):
                used[token] = 1

    for text in texts:
        batch.append(text)
        n_bytes += len(text.encode("utf-8"))
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            encode()
            batch, size = [], 0
    encode()
    if not tokens:
        raise TokenizerError("there is no text to measure", "a file with some text")
    return TokenizerStats(n_bytes, tokens, n_bytes / tokens, tokens / seconds, sum(used) / len(used))
