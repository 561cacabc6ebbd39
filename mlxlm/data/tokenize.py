"""Turns documents into chunks of token ids, in parallel batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from mlxlm.data.text import Document
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError

# The chat template of models trained here. `tokenize` gives exactly these tokens, then EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("system", "user", "assistant", "developer")
BATCH_CHARS = 1 << 18  # characters tokenized at a time: about 50 ms on two cores, and 15 MB of encodings


class Chunk(NamedTuple):
    """Token ids of a part of a document.

    Attributes:
        ids: Token ids, with special tokens.
        text_bytes: UTF-8 size of the text, without special tokens.
        starts_document: Whether the first id starts a document.
        loss_mask: uint8, 1 for each id that is a training target: in a conversation, the assistant's messages with
            their <|end|>. None for a text: all are targets.
    """

    ids: np.ndarray
    text_bytes: int
    starts_document: bool
    loss_mask: np.ndarray | None = None


class _Part(NamedTuple):
    """Text between special tokens."""

    before: list[int]
    text: str
    after: list[int]
    starts_document: bool = False
    continues: bool = False  # the text of the previous part
    loss_mask: bool | None = None  # of the text and `after`; None: the document is a text


def tokenize(source: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Chunk]:
    """Yield the chunks of all documents in order.

    A text is BOS, text, EOS (BOS and EOS if the tokenizer has them, BOS only if it differs from EOS); a conversation is
    what `CHAT_TEMPLATE` renders, and EOS. Text is never parsed for special tokens.

    Raises:
        DataError: A conversation has a role without a token, or the tokenizer has neither BOS nor EOS, so that nothing
            would mark where a document ends.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has neither a BOS nor an EOS token", "one from mlxlm tokenizer train")
    # While the tokenizer's threads work on one batch, this thread reads the next and yields the previous one.
    with ThreadPoolExecutor(1, "mlxlm tokenize") as pool:
        encoding = None
        for batch in _batches(source, tokenizer):
            previous, encoding = encoding, pool.submit(_encode, batch, tokenizer)
            if previous is not None:
                yield from previous.result()
        if encoding is not None:
            yield from encoding.result()


def _batches(source: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    size = 0
    for document in source:
        for part in _parts(document, tokenizer):
            batch.append(part)
            size += len(part.text) + 16  # 16 bounds the number of parts without text
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _parts(document: Document, tokenizer: Tokenizer) -> Iterator[_Part]:
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # If one token is both (GPT-2's <|endoftext|>), once between two texts is enough.
    bos = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    if document.messages is None:
        before, first = bos if document.add_bos else [], True
        for piece in document.pieces:
            yield _Part(before if first else [], piece, [], first, continues=not (first and document.add_bos))
            first = False
        if first:  # the second part of a text that was cut can be empty
            yield _Part(before, "", [], starts_document=True)
    else:
        yield _Part(bos, "", [], starts_document=True, loss_mask=False)
        check_conversation(document)
        for message in document.messages:
            end = _control_id(tokenizer, "end", document.location)
            role = "system" if message["role"] == "developer" else message["role"]
            role_id = _control_id(tokenizer, role, document.location)
            is_learned = message["role"] == "assistant" and message["weight"] == 1
            yield _Part([role_id], message["content"], [end], loss_mask=is_learned)
    if document.add_eos:
        yield _Part([], "", eos, loss_mask=None if document.messages is None else False)


def check_role(role: str, location: str, roles: Collection[str] = ROLES) -> None:
    """Raise DataError if a message has none of these roles; the message names `location`."""
    if role not in roles:
        raise DataError(f"{location}: role '{role}' is not known", f"one of {', '.join(roles)}")


def check_conversation(document: Document) -> None:
    """Raise DataError if `document` is a conversation with something that `CHAT_TEMPLATE` doesn't show."""
    for message in document.messages or ():
        check_role(message["role"], document.location)
    if document.rejected is not None:
        hint = "mlxlm finetune --loss dpo"
        raise DataError(f"{document.location} is a preference, which only fine-tuning can learn", hint)
    if document.tools or any(message.get("tool_calls") for message in document.messages or ()):
        hint = "mlxlm finetune, which shows them as a chat does"
        raise DataError(f"{document.location} has tools or tool calls, which only fine-tuning can learn", hint)


def _control_id(tokenizer: Tokenizer, name: str, location: str) -> int:
    token = tokenizer.special_tokens.get(f"<|{name}|>")
    if token is None:
        hint = "mlxlm finetune, or a tokenizer from mlxlm tokenizer train"
        raise DataError(f"{location} is a conversation, but the tokenizer has no <|{name}|>", hint)
    return token


def _encode(batch: list[_Part], tokenizer: Tokenizer) -> list[Chunk]:
    encoded = tokenizer.encode_batch([part.text for part in batch], continues=[part.continues for part in batch])
    chunks = []
    for part, text_ids in zip(batch, encoded, strict=True):
        ids = np.array([*part.before, *text_ids, *part.after], np.uint32)
        loss_mask = None if part.loss_mask is None else np.full(len(ids), part.loss_mask, np.uint8)
        if loss_mask is not None:
            loss_mask[: len(part.before)] = 0
        chunks.append(Chunk(ids, len(part.text.encode("utf-8")), part.starts_document, loss_mask))
    return chunks
