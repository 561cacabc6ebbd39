"""Tasks that a language model can do by continuing a text, with several answers to choose from.

Each has conditions from easy to hard, such as the number of words to copy. What is frequent is no help: a model that
ignores the question chooses the right answer as often as by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from mlxlm.evaluate.suite.minimal_pairs import words

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_NUM_WRONG = 3  # answers of a question, besides the right one
_LISTS = ("thing", "animal", "place", "stuff", "color", "adjective")


class TaskItem(NamedTuple):
    """A prompt and its answers, the right one first."""

    prompt: str
    answers: list[str]


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: Such as "copy".
        unit: Of the conditions, such as "words".
        conditions: From easy to hard.
        chance: Accuracy of a random choice.
        num_examples: Solved ones before each question, the same for all of a condition.
        item: Makes an item of a condition.
    """

    name: str
    unit: str
    conditions: tuple[int, ...]
    chance: float
    num_examples: int
    item: Callable[[random.Random, int], TaskItem]

    def items(self, condition: int, num_items: int, seed: int = 0) -> list[TaskItem]:
        """Generate different items of one of the conditions. More items begin with the same ones."""
        rng = random.Random(f"{seed} {self.name} {condition}")
        found: dict[str, TaskItem] = {}
        while len(found) < self.num_examples + num_items:
            item = self.item(rng, condition)
            found.setdefault(item.prompt, item)
        examples, items = islice(found.values(), self.num_examples), islice(found.values(), self.num_examples, None)
        solved = "".join(prompt + answers[0] for prompt, answers in examples)
        return [TaskItem(solved + prompt, answers) for prompt, answers in items]


def random_words(rng: random.Random, count: int) -> list[str]:
    """Different words, in random order."""
    return rng.sample([forms[0] for name in _LISTS for forms in words(name)], count)


def _copy(rng: random.Random, length: int) -> TaskItem:
    chosen = random_words(rng, length)
    return _sequence(rng, chosen, chosen)


def _reversal(rng: random.Random, length: int) -> TaskItem:
    chosen = random_words(rng, length)
    return _sequence(rng, chosen, chosen[::-1])


def _sequence(rng: random.Random, given: list[str], answer: list[str]) -> TaskItem:
    """Wrong answers have two words of the right one exchanged, or two others, or both.

    Each of the four differs from the others in the same way, so a model that ignores the question is right in a quarter
    of the cases. Wrong answers that each change the right one independently would be closer to it than to each other.
    """
    i, j, k, m = rng.sample(range(len(answer)), 4)
    first, second = {i: j, j: i}, {k: m, m: k}
    exchanges: tuple[dict[int, int], ...] = ({}, first, second, first | second)
    answers = [[answer[exchange.get(place, place)] for place in range(len(answer))] for exchange in exchanges]
    return TaskItem(" ".join(given) + " =", [f" {' '.join(order)}\n" for order in answers])


def _recall(rng: random.Random, num_pairs: int) -> TaskItem:
    """Wrong answers are those of other keys."""
    names = rng.sample([forms[0] for forms in words("name")], num_pairs)
    things = rng.sample([forms[0] for forms in words("thing")], num_pairs)
    facts = " ".join(f"{name} has the {thing}." for name, thing in zip(names, things, strict=True))
    asked = rng.randrange(num_pairs)
    others = rng.sample(things[:asked] + things[asked + 1 :], _NUM_WRONG)
    return TaskItem(f"{facts} {names[asked]} has the", [f" {thing}." for thing in (things[asked], *others)])


def _addition(rng: random.Random, digits: int) -> TaskItem:
    """Wrong answers are the sums of other numbers with as many digits."""

    def number() -> int:
        return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

    a, b = number(), number()
    sums = {a + b: None}
    while len(sums) <= _NUM_WRONG:
        sums[number() + number()] = None
    return TaskItem(f"{a} + {b} =", [f" {value}\n" for value in sums])


def _brackets(rng: random.Random, depth: int) -> TaskItem:
    """Open `depth` brackets, each followed by some pairs that are closed. Wrong answers close the last one wrongly."""
    opened = rng.choices(list(_BRACKETS), k=depth)
    parts = []
    for bracket in opened:
        pairs = rng.choices(list(_BRACKETS.items()), k=rng.randint(1, 3))
        parts += [bracket, *(side for pair in pairs for side in pair)]
    first, *rest = (_BRACKETS[bracket] for bracket in reversed(opened))
    firsts = [first, *(bracket for bracket in _BRACKETS.values() if bracket != first)]
    return TaskItem(" ".join(parts), [f" {' '.join((bracket, *rest))}\n" for bracket in firsts])


TASKS = (
    Task("copy", "words", (4, 8, 16), 1 / 4, 2, _copy),
    Task("reversal", "words", (4, 8, 16), 1 / 4, 2, _reversal),
    Task("key-value recall", "pairs", (4, 8, 16), 1 / 4, 0, _recall),
    Task("addition", "digits", (1, 2, 3, 4), 1 / 4, 6, _addition),
    Task("bracket depth", "open", (1, 2, 4, 8), 1 / 3, 3, _brackets),
)
