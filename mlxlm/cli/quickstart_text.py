"""What `mlxlm quickstart` trains on: a built-in corpus or files, and prompts to try the model with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from mlxlm.utils.errors import DataError

if TYPE_CHECKING:
    from mlxlm.data.text import Document

SMALL_WORLD = "small-world"
CORPORA = [SMALL_WORLD, "python-reference"]
_SMALL_WORLD_BYTES = 5_000_000  # more than two minutes of training read
_KINDS_SHOWN = ("stories", "sums", "questions about a text")
_MIN_CHARACTERS = 2_000
_PREVIEW_CHARACTERS = 100_000
_PREVIEW_PIECES = 8  # of a document, about 16,000 characters each
_MAX_PROMPT = 80  # characters


class Preview(NamedTuple):
    """What the beginning of a text shows.

    Attributes:
        size: Characters, counted up to about 100,000.
        has_conversations: Whether it has messages.
        prompts: Three prompts: first questions of conversations, or else the first words of passages.
    """

    size: int
    has_conversations: bool
    prompts: list[str]

    @classmethod
    def read(cls, sources: Sequence[str], on_bad_input: str) -> Self:
        """Read the beginning of `sources`. Raises DataError if it can't be read, or is too short to learn from."""
        from mlxlm.data import BadInput, read_documents

        size, questions, words = 0, [], []
        for document in read_documents(sources, on_bad=BadInput(on_bad_input)):
            for piece in _pieces(document):
                size += len(piece)
                words += piece.split()
            questions += [m["content"] for m in document.messages or () if m["role"] == "user"][:1]
            if size >= _PREVIEW_CHARACTERS:
                break
        if size < _MIN_CHARACTERS:
            problem = f"{', '.join(sources)}: {size} characters are too few to learn from"
            raise DataError(problem, f"at least {_MIN_CHARACTERS:,}")
        passages = questions or [" ".join(words[i : i + 4]) for i in range(len(words))] or [""]
        prompts = [_printable(passages[i * len(passages) // 3]) or "The" for i in range(3)]
        return cls(size, bool(questions), prompts)


def write_corpus(name: str, folder: Path) -> Path:
    """Write a built-in corpus into `folder` and return its path. Raises DataError."""
    from mlxlm.data.builtin import write_python_reference
    from mlxlm.data.small_world.corpus import write_small_world

    path = folder / f"{name}.jsonl"
    if name == SMALL_WORLD:
        write_small_world(path, _SMALL_WORLD_BYTES)
    else:
        write_python_reference(path)
    return path


def held_out_prompts() -> list[str]:
    """Return questions of the small world whose combination of words isn't trained on."""
    from mlxlm.data.small_world.corpus import held_out_questions

    return [next(held_out_questions(kind)).question for kind in _KINDS_SHOWN]


def _pieces(document: Document) -> Iterable[str]:
    if document.messages is not None:
        return document.contents
    return islice(document.pieces, _PREVIEW_PIECES)


def _printable(text: str) -> str:
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:_MAX_PROMPT]
