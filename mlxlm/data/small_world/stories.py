"""Stories of the small world: plots, with people, things and places filled in."""

from __future__ import annotations

import random
import re

from mlxlm.data.small_world.plots import Plot
from mlxlm.data.small_world.words import (
    ANIMALS,
    COLORS,
    FLOWERS,
    FOODS,
    FRUITS,
    GIRLS,
    HIDING_PLACES,
    NAMES,
    OUTDOORS,
    PET_NAMES,
    PETS,
    PLACES,
    RELATIVES,
    TOYS,
)

CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r'(^|[.!?] |(?:^| )")([a-z])')
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def cast(rng: random.Random) -> dict[str, str]:
    """Choose the people, things and places of a story.

    Returns:
        a, b: two names, with the pronouns he, him, his of the first and he2, him2, his2 of the second;
        and one word for each other kind, such as toy, place and animal.
    """
    a, b = rng.sample(NAMES, 2)
    animal, animal2 = rng.sample(ANIMALS, 2)
    relative = rng.choice(RELATIVES)
    words = {"a": a, "b": b, "animal": animal, "animal2": animal2, "relative": relative}
    kinds = {"toy": TOYS, "color": COLORS, "place": PLACES, "outside": OUTDOORS, "pet": PETS}
    kinds |= {"hiding": HIDING_PLACES, "food": FOODS, "fruit": FRUITS, "flower": FLOWERS, "petname": PET_NAMES}
    words |= {kind: rng.choice(choices) for kind, choices in kinds.items()}
    for name, suffix in ((a, ""), (b, "2")):
        pronouns = ("she", "her", "her") if name in GIRLS else ("he", "him", "his")
        words |= {f"{key}{suffix}": pronoun for key, pronoun in zip(("he", "him", "his"), pronouns, strict=True)}
    words["relative_of_a"] = f"{words['his']} {relative}"
    return words


def fill(text: str, words: dict[str, str], rng: random.Random) -> str:
    """Choose among the wordings of a sentence, fill in the words, and correct capitals and articles."""
    chosen = CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
    filled = _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), chosen.format_map(words))
    return correct_articles(filled)


def correct_articles(text: str) -> str:
    """Replace "a" before a vowel by "an"."""
    return _ARTICLE.sub(lambda match: match[1] + "n ", text)


def story(plot: Plot, words: dict[str, str], rng: random.Random) -> str:
    """Tell a story: its sentences, filled in, in one paragraph."""
    return " ".join(fill(sentence, words, rng) for sentence in plot.sentences)
