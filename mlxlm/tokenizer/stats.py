"""How well a tokenizer fits a text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from mlxlm.tokenizer.tokenizer import Tokenizer
from mlxlm.utils.errors import TokenizerError

_BATCH = 1 << 19  # characters


@dataclass
class TokenizerStats:
    """Measures of a tokenizer on a text; special tokens are not counted.

    bytes, tokens: of the text (UTF-8) and of its encoding.
    bytes_per_token: higher is better, at the same vocabulary size.
    tokens_per_second: speed of encoding in batches.
    vocabulary_used: share of all ids that occur, 0 to 1.
    """

    bytes: int
    tokens: int
    bytes_per_token: float
    tokens_per_second: float
    vocabulary_used: float


def tokenizer_stats(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerStats:
    """Encode `texts`, in bounded memory. Raises TokenizerError if there is no text."""
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
        if size >= _BATCH:
            encode()
            batch, size = [], 0
    encode()
    if not tokens:
        raise TokenizerError("there is no text to measure", "a file with some text")
    return TokenizerStats(n_bytes, tokens, n_bytes / tokens, tokens / seconds, sum(used) / len(used))
