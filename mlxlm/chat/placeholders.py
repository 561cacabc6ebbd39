"""Placeholder characters for texts whose token ids are known, while a template is rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlxlm.utils.errors import TokenizerError

# Supplementary Private Use Area-A: characters that text doesn't use, and no template looks for.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Placeholders:
    """The placeholders of one conversation.

    Attributes:
        ids: Token ids by placeholder.
        answers: Placeholders of answers.
    """

    def __init__(self, text: str):
        """`text` is everything that is rendered; its characters can't be placeholders."""
        self._free = _unused_characters(text)
        self._texts: dict[str, str] = {}  # by placeholder
        self._by_text: dict[str, str] = {}
        self.ids: dict[str, Sequence[int]] = {}
        self.answers: set[str] = set()

    def take(self, text: str, ids: Sequence[int], answer: bool = False) -> str:
        """Return a placeholder for `text`: the same one for the same text, unless it is an answer."""
        if not answer and text in self._by_text:
            return self._by_text[text]
        character = next(self._free, None)
        if character is None:
            raise TokenizerError("this conversation has too many answers", "a new conversation")
        self._texts[character], self.ids[character] = text, ids
        if answer:
            self.answers.add(character)
        else:
            self._by_text[text] = character
        return character

    def restore(self, text: str) -> str:
        """Return `text` with every placeholder replaced by its text."""
        return "".join(self._texts.get(piece, piece) for piece in self.split(text))

    def split(self, text: str) -> Iterator[str]:
        """Yield the placeholders in `text` and the text between them, in order."""
        pieces = re.split(f"([{''.join(self.ids)}])", text) if self.ids else [text]
        return filter(None, pieces)


def _unused_characters(text: str) -> Iterator[str]:
    used = set(text)  # takes a moment for a long text, and most conversations need no placeholder
    yield from (c for c in map(chr, _PRIVATE_USE) if c not in used)
