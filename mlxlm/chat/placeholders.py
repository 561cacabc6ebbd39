"""Characters that stand, while a template is rendered, for texts whose ids are known already."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlxlm.utils.errors import TokenizerError

# Supplementary Private Use Area-A: characters that text doesn't use, and no template looks for.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Placeholders:
    """The stand-ins of one conversation, and what each stands for."""

    def __init__(self, text: str):
        """`text`: all that is rendered; its characters can't be taken."""
        used = set(text)
        self._free = (c for c in map(chr, _PRIVATE_USE) if c not in used)
        self._texts: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        self.ids: dict[str, Sequence[int]] = {}
        self.answers: set[str] = set()

    def take(self, text: str, ids: Sequence[int], answer: bool = False) -> str:
        """The character that stands for `text`; the same one for the same text, unless it is an answer."""
        if not answer and text in self._taken:
            return self._taken[text]
        character = next(self._free, None)
        if character is None:
            raise TokenizerError("this conversation has too many answers", "a new one")
        self._texts[character], self.ids[character] = text, ids
        if answer:
            self.answers.add(character)
        else:
            self._taken[text] = character
        return character

    def restore(self, text: str) -> str:
        """`text` with every stand-in replaced by what it stands for."""
        return text.translate(str.maketrans(self._texts))

    def split(self, text: str) -> Iterator[str]:
        """The stand-ins in `text` and the stretches between them, in order."""
        pattern = f"([{''.join(self._texts)}])" if self._texts else "(?!)"
        return filter(None, re.split(pattern, text))
