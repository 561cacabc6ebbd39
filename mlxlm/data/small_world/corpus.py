"""The small-world corpus: conversations to train on, and held-out questions to evaluate a model with."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mlxlm.data.small_world.tasks import KINDS, NAMES, Turn
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import atomic_new_file
from mlxlm.utils.json_files import json_line

# Of fixed questions and answers, nothing can be held out.
EVALUATED_KINDS = tuple(kind for kind in KINDS if kind not in ("small talk", "unknown"))

_HELD_OUT_QUESTIONS = 100  # of each kind; some have fewer
_CAREFUL = 0.8  # of the questions have a capital letter and a punctuation mark
_MAX_TRIES = 5_000  # for a new question, before all are taken to be known


def conversations(seed: int = 0) -> Iterator[list[Turn]]:
    """Yield conversations of up to four questions with follow-ups, without end; the same ones for the same seed."""
    rng = random.Random(seed)
    kinds, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    while True:
        turns: list[Turn] = []
        for kind in rng.choices(kinds, weights, k=rng.randint(1, 4)):
            while (turn := KINDS[kind][0](rng)).held_out:
                pass
            turns += [turn, *turn.follow_ups]
        yield [_typed(turn, rng) for turn in turns]


def _typed(turn: Turn, rng: random.Random) -> Turn:
    """A turn whose question is sometimes typed as in a chat: without a capital letter and the last punctuation mark."""
    if rng.random() < _CAREFUL:
        return turn
    question = turn.question.rstrip(".!?")
    first = question.partition(" ")[0].strip(",.!")
    keep = first in NAMES or first == "I"
    return replace(turn, question=question if keep else question[0].lower() + question[1:])


def write_small_world(
    path: Path, num_bytes: int, seed: int = 0, progress: Callable[[int], None] = lambda _num_bytes: None
) -> None:
    """Write conversations as JSON lines with "messages". The same arguments give the same bytes.

    Args:
        path: A new file.
        num_bytes: Write until the file has at least this size.
        seed: Chooses the conversations.
        progress: Called with the number of bytes of each line.

    Raises:
        DataError: The file exists, or can't be written.
    """
    size = 0
    with atomic_new_file(path, DataError) as file:
        for turns in conversations(seed):
            line = json_line({"messages": messages(turns)})
            file.write(line)
            progress(len(line))
            size += len(line)
            if size >= num_bytes:
                return


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    """Turns as messages with "role" and "content"."""
    pairs = (("user", turn.question, "assistant", turn.answer) for turn in turns)
    return [message for u, q, a, t in pairs for message in ({"role": u, "content": q}, {"role": a, "content": t})]


def held_out_questions(kind: str, seed: int = 0) -> Iterator[Turn]:
    """Yield questions of a kind whose combination of words isn't in the corpus, each once, until there are no more."""
    rng, seen = random.Random(seed), set[str]()
    tries = 0
    while (tries := tries + 1) < _MAX_TRIES:
        turn = KINDS[kind][0](rng)
        if turn.held_out and turn.question not in seen:
            seen.add(turn.question)
            tries = 0
            yield turn


def held_out_conversations() -> Iterator[list[Turn]]:
    """Yield conversations about held-out questions: up to 100 of each kind, always the same."""
    for kind in EVALUATED_KINDS:
        for turn in islice(held_out_questions(kind), _HELD_OUT_QUESTIONS):
            yield [turn, *turn.follow_ups]


def is_right(turn: Turn, answer: str) -> bool:
    """Whether an answer is right: the required words as whole words, and the right people.

    A story may have one person more than was asked for, up to two; other answers name nobody new.
    """
    if not all(re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", answer) for words in turn.required):
        return False
    asked, named = _people(turn.question), _people(answer)
    is_story = turn.combination[:1] == ("story",)
    return len(named - asked) <= (max(0, 2 - len(asked)) if is_story else 0)


def _people(text: str) -> set[str]:
    return set(NAMES).intersection(re.findall(r"\w+", text))
