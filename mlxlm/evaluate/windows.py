"""The windows of tokens in which `evaluate`, `compare` and `quantize` read a text, so that their figures are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxlm.data import Document
from mlxlm.generation.scoring import first_token_bytes
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import ConfigError, DataError

MAX_WINDOW = 2048  # tokens of a window, unless asked for: models that read 128k would need memory and hours for it
_PIECES = 16  # of text that are tokenized together


def window_lengths(most: int, context_length: int | None = None, stride: int | None = None) -> tuple[int, int]:
    """Tokens of a window (default: `most`, the model's context, at most 2048), and tokens from the start of one window
    to the start of the next (default: half of a window).

    Raises ConfigError for a context or stride that can't work.
    """
    context_length = min(most, MAX_WINDOW) if context_length is None else context_length
    if not 1 <= context_length <= most:
        raise ConfigError(f"a context of {context_length} tokens, and the model reads {most}", f"from 1 to {most}")
    stride = max(1, context_length // 2) if stride is None else stride
    if not 1 <= stride <= context_length:
        raise ConfigError(
            f"a stride of {stride} would leave out tokens of a context of {context_length}", f"1 to {context_length}"
        )
    return context_length, stride


def windows(chunks: Iterable[list[int]], context_length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Up to `context_length` + 1 tokens, and how many of the last are to be predicted; of one document, given in chunks.

    The first window's tokens are predicted from its start on, and of each later window the last `stride`, so that every
    token is predicted once.
    """
    held: list[int] = []
    done = 1  # of `held`, those predicted, or with nothing before them
    for ids in chunks:
        held += ids
        at = 0
        while len(held) - at > context_length:
            yield held[at : at + context_length + 1], context_length + 1 - done
            at += stride
            done = context_length + 1 - stride
        held = held[at:]
    if len(held) > done:
        yield held, len(held) - done


class DocumentTokens:
    """The ids of a document, read once; after that `bytes` and `characters` of what all but its unpredicted first token
    stand for.

    A document begins with what the tokenizer puts in front of a text, usually BOS; where that is nothing, its first
    token is not predicted. Raises DataError for a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, document: Document):
        if document.messages is not None:
            raise DataError(
                f"{document.location} is a conversation", "texts; of conversations, mlxlm prepare and a run"
            )
        self._tokenizer, self._document = tokenizer, document
        self.bytes = self.characters = 0

    def chunks(self) -> Iterator[list[int]]:
        start = self._tokenizer.prefix_token_ids
        yield start
        first, pieces = True, []
        for piece in self._document.pieces:
            pieces.append(piece)
            if len(pieces) == _PIECES:
                yield self._encoded(pieces, first, bool(start))
                first, pieces = False, []
        if pieces:
            yield self._encoded(pieces, first, bool(start))

    def exclude_after(self, ids: list[int], count: int) -> None:
        """Don't count the bytes and characters of `ids`, all that were given, behind the first `count`."""
        if self._tokenizer.has_byte_tokens:
            self._subtract(b"".join(map(self._tokenizer.token_bytes, ids[count:])))
            return
        whole, kept = (self._tokenizer.decode(part) for part in (ids, ids[:count]))
        self.bytes -= len(whole.encode("utf-8")) - len(kept.encode("utf-8"))
        self.characters -= len(whole) - len(kept)

    def _subtract(self, spelled: bytes) -> None:
        self.bytes -= len(spelled)
        self.characters -= len(spelled.decode("utf-8", "ignore"))

    def _encoded(self, pieces: list[str], first: bool, predicted: bool) -> list[int]:
        self.bytes += sum(len(piece.encode("utf-8")) for piece in pieces)
        self.characters += sum(map(len, pieces))
        parts = self._tokenizer.encode_batch(pieces, continues=[not first or i > 0 for i in range(len(pieces))])
        ids = [id for part in parts for id in part]
        if first and ids and not predicted:
            self._subtract(first_token_bytes(self._tokenizer, ids[0]))
        return ids


def first_tokens(tokenizer: Tokenizer, documents: Iterable[Document], count: int) -> tuple[list[list[int]], int]:
    """The first `count` ids of `documents`, document by document, and the bytes of all that are predicted."""
    found: list[list[int]] = []
    size = 0
    for document in documents:
        text, ids = DocumentTokens(tokenizer, document), []
        for chunk in text.chunks():
            ids += chunk
            if len(ids) >= count:
                break
        text.exclude_after(ids, count)
        found.append(ids[:count])
        size += text.bytes
        count -= len(ids)
        if count <= 0:
            break
    return found, size
