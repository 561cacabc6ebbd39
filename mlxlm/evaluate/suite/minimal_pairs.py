"""Minimal pairs: two sentences that differ in one grammatical respect, one grammatical and one not.

The method is that of BLiMP (Warstadt et al. 2020, "BLiMP: The Benchmark of Linguistic Minimal Pairs for English"); the
words and templates are our own, of words that models of children's stories know. `minimal_pairs.json` has both. In a
template `[good|bad]` is where the sentences differ. `{thing}` stands for a word of that list and `{thing2}` for another
one; `{thing:1}` is its second form. In `{thing:n}` n is 0 or 1, `-n` is 1 - n; m is the same, independently.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

from mlxlm.utils.json_files import read_json

_SLOT = re.compile(r"\{([a-z]+)(\d?)(?::(-?)([01nm]))?\}")
_DIFFERENCE = re.compile(r"\[(.*)\|(.*)\]")
_NUMBERS = list(product((0, 1), repeat=2))  # n and m


class MinimalPair(NamedTuple):
    """A grammatical sentence, and one that differs from it and is not grammatical."""

    good: str
    bad: str


@cache
def _data() -> dict[str, Any]:
    return read_json(Path(__file__).with_name("minimal_pairs.json"))


def phenomena() -> dict[str, list[str]]:
    """The templates of each grammatical phenomenon."""
    return _data()["phenomena"]


@cache
def words(name: str) -> list[list[str]]:
    """The forms of each word of a list, such as [["boy", "boys"], ...]."""
    return [word.split("/") for word in _data()["words"][name].split(", ")]


def minimal_pairs(phenomenon: str, num_pairs: int, seed: int = 0) -> list[MinimalPair]:
    """Generate different pairs of a phenomenon.

    They take its templates in turn, and singular and plural equally often. More pairs begin with the same ones.

    Args:
        phenomenon: One of `phenomena()`.
        num_pairs: How many.
        seed: Of the choice of words.
    """
    templates = phenomena()[phenomenon]
    generators = [random.Random(f"{seed} {template}") for template in templates]
    pairs: dict[MinimalPair, None] = {}
    for i in range(num_pairs):
        template, rng = templates[i % len(templates)], generators[i % len(templates)]
        numbers = dict(zip("nm", _NUMBERS[i // len(templates) % 4], strict=True))
        pairs[next(pair for _ in count() if (pair := _fill(template, numbers, rng)) not in pairs)] = None
    return list(pairs)


def _fill(template: str, numbers: Mapping[str, int], rng: random.Random) -> MinimalPair:
    chosen: dict[str, list[list[str]]] = {}

    def word(slot: re.Match[str]) -> str:
        name, which, sign, form = slot.groups()
        forms = chosen.setdefault(name, rng.sample(words(name), min(2, len(words(name)))))[which == "2"]
        index = numbers[form] if form in numbers else int(form or 0)
        return forms[1 - index if sign else index]

    good, bad = (_SLOT.sub(word, _DIFFERENCE.sub(rf"\{side}", template)) for side in (1, 2))
    return MinimalPair(_capitalized(good), _capitalized(bad))


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
