"""Sliding windows over a text: the same for `evaluate`, `compare` and `quantize`, so that their numbers agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxlm.data import Document
from mlxlm.generation.scoring import first_token_bytes
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import ConfigError, DataError

MAX_WINDOW = 2048  # default limit, in tokens: a context of 128k would take much memory and hours
_PIECES = 16  # of text that are tokenized at a time


def window_lengths(max_length: int, context_length: int | None = None, stride: int | None = None) -> tuple[int, int]:
    """Resolve the defaults of window length and stride.

    Args:
        max_length: The model's context, in tokens.
        context_length: Tokens of a window. None: the model's context, at most 2048.
        stride: Tokens from the start of one window to the start of the next. None: half a window.

    Raises:
        ConfigError: The context length or stride can't work.
    """
    context_length = min(max_length, MAX_WINDOW) if context_length is None else context_length
    if not 1 <= context_length <= max_length:
        problem = f"a context of {context_length} tokens doesn't fit the model's context of {max_length}"
        raise ConfigError(problem, f"from 1 to {max_length}")
    stride = max(1, context_length // 2) if stride is None else stride
    if not 1 <= stride <= context_length:
        problem = f"a stride of {stride} would skip tokens with a context of {context_length}"
        raise ConfigError(problem, f"1 to {context_length}")
    return context_length, stride


def windows(chunks: Iterable[list[int]], context_length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of up to `context_length` + 1 tokens of one document, with the number of last tokens to predict.

    These are all but the first token in the first window, then the last `stride` of each, so that every token is
    predicted once.
    """
    buffer: list[int] = []
    predicted = 1  # tokens at the start of the buffer that are predicted, or have no context
    for ids in chunks:
        buffer += ids
        start = 0
        while len(buffer) - start > context_length:
            yield buffer[start : start + context_length + 1], context_length + 1 - predicted
            start += stride
            predicted = context_length + 1 - stride
        buffer = buffer[start:]
    if len(buffer) > predicted:
        yield buffer, len(buffer) - predicted


class DocumentTokens:
    """Token ids of a text.

    It starts with the tokens that the tokenizer adds, usually BOS; if it adds none, the first token is not predicted.

    Attributes:
        bytes: UTF-8 bytes of the predicted tokens read so far.
        characters: Unicode characters of the same.

    Raises:
        DataError: The document is a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, document: Document):
        if document.messages is not None:
            hint = "text; for conversations, mlxlm prepare and a training run"
            raise DataError(f"{document.location} is a conversation", hint)
        self._tokenizer, self._document = tokenizer, document
        self.bytes = self.characters = 0

    def chunks(self) -> Iterator[list[int]]:
        """Yield the token ids, once."""
        start = self._tokenizer.prefix_token_ids
        yield start
        first, pieces = True, []
        for piece in self._document.pieces:
            pieces.append(piece)
            if len(pieces) == _PIECES:
                yield self._encode(pieces, first, bool(start))
                first, pieces = False, []
        if pieces:
            yield self._encode(pieces, first, bool(start))

    def exclude_after(self, ids: list[int], count: int) -> None:
        """Subtract the bytes and characters of all but the first `count` of `ids`, which are all ids read so far."""
        if self._tokenizer.has_byte_tokens:
            self._subtract(b"".join(map(self._tokenizer.token_bytes, ids[count:])))
            return
        text, prefix = (self._tokenizer.decode(part) for part in (ids, ids[:count]))
        self.bytes -= len(text.encode("utf-8")) - len(prefix.encode("utf-8"))
        self.characters -= len(text) - len(prefix)

    def _subtract(self, text: bytes) -> None:
        self.bytes -= len(text)
        self.characters -= len(text.decode("utf-8", "ignore"))

    def _encode(self, pieces: list[str], first: bool, predicted: bool) -> list[int]:
        self.bytes += sum(len(piece.encode("utf-8")) for piece in pieces)
        self.characters += sum(map(len, pieces))
        parts = self._tokenizer.encode_batch(pieces, continues=[not first or i > 0 for i in range(len(pieces))])
        ids = [id for part in parts for id in part]
        if first and ids and not predicted:
            self._subtract(first_token_bytes(self._tokenizer, ids[0]))
        return ids


def first_tokens(tokenizer: Tokenizer, documents: Iterable[Document], count: int) -> tuple[list[list[int]], int]:
    """The first `count` token ids of `documents`, one list per document, and the bytes of those that are predicted."""
    tokens: list[list[int]] = []
    size = 0
    for document in documents:
        text, ids = DocumentTokens(tokenizer, document), []
        for chunk in text.chunks():
            ids += chunk
            if len(ids) >= count:
                break
        text.exclude_after(ids, count)
        tokens.append(ids[:count])
        size += text.bytes
        count -= len(ids)
        if count <= 0:
            break
    return tokens, size
