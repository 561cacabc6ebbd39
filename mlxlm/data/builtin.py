"""A built-in text for calibration and evaluation: Python's language reference as conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import cycle

from mlxlm.utils.errors import DataError

_ANSWER_CHARS = 600  # an answer with its question fits the context of the small presets
_QUESTIONS = ("{0}", "What is {0}?", "Tell me about {0}.", "Explain {0}.", "{0} in Python")
_FOLLOW_UPS = ("more", "Go on.", "And then?")


def python_reference() -> Iterator[list[dict[str, str]]]:
    """Yield conversations about Python's language reference, from the standard library's `pydoc_data.topics`.

    Each topic is cut into conversations: a question, some paragraphs as the answer, and follow-ups for the next ones.

    Yields:
        Lists of messages with "role" and "content".

    Raises:
        DataError: Python lacks the module; some minimal Linux packages leave it out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python lacks pydoc_data.topics", "a text file of yours: mlxlm quickstart FILE") from None
    questions, follow_ups = cycle(_QUESTIONS), cycle(_FOLLOW_UPS)
    for topic, text in sorted(topics.items()):
        parts = list(_parts(text))
        for start in range(0, len(parts), 3):
            messages = [{"role": "user", "content": next(questions).format(topic)}]
            for i, part in enumerate(parts[start : start + 3]):
                if i:
                    messages.append({"role": "user", "content": next(follow_ups)})
                messages.append({"role": "assistant", "content": part})
            yield messages


def _parts(text: str) -> Iterator[str]:
    """Paragraphs, joined up to `_ANSWER_CHARS` characters; a longer paragraph stays whole."""
    part = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if part and len(part) + len(paragraph) > _ANSWER_CHARS:
            yield part
            part = ""
        part = f"{part}\n\n{paragraph}" if part else paragraph
    if part:
        yield part
