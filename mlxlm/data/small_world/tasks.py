"""The kinds of questions in the small world, each with its answers and what a right answer must contain.

`small_world.json` has its words, the plots of its stories, and its facts and small talk. The words are few, so that a
model learns to tell them apart within minutes, and combine to far more than it can memorize. A plot says what the story
is about, and has sentences, and questions with their answers and the word that a right answer contains. In all texts,
`[one|two]` is a choice of wording and `{name}` a word that is filled in.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_DATA = json.loads(Path(__file__).with_name("small_world.json").read_text("utf-8"))
WORDS, PLOTS = _DATA["words"], _DATA["plots"]
NAMES: list[str] = WORDS["girls"] + WORDS["boys"]
PLACES = WORDS["places"] = WORDS["indoors"] + WORDS["outdoors"]

CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r'(^|[.!?] |(?:^| )")([a-z])')
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_NAMES = re.compile(r"\{\w+\}")
_PRONOUNS = ("he", "him", "his", "he2", "him2", "his2")
_SUBJECTS = ("", "{a}", "{a} and {b}", "{a} and a {pet}", "a {pet}", "a {toy}", "{a} and a {toy}", "a {color} {toy}")
_STORY_REQUESTS = (
    "Tell me a story about {subject}.",
    "Can you tell me a story about {subject}?",
    "A story about {subject}, please.",
)

MAX_NUMBER = 20  # of sums and sorting


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: What the user says.
        answer: What the assistant says.
        combination: The words that are put together in the question; a tenth of all combinations is held out.
        required: What a right answer contains, as whole words.
        follow_ups: More turns about the same story.
    """

    question: str
    answer: str
    combination: tuple[str, ...]
    required: tuple[str, ...]
    follow_ups: tuple[Turn, ...] = ()

    @property
    def held_out(self) -> bool:
        """Whether this combination is kept for evaluation and never occurs in the corpus."""
        digest = hashlib.blake2b(" ".join(self.combination).encode(), digest_size=8).digest()
        return len(self.combination) > 1 and int.from_bytes(digest) % 10 == 0


def cast(rng: random.Random) -> dict[str, str]:
    """Choose the people, things and places of a story.

    Returns:
        a, b: two names, with the pronouns he, him, his of the first and he2, him2, his2 of the second;
        and one word for each other kind, such as toy, place and animal.
    """
    a, b = rng.sample(NAMES, 2)
    animal, animal2 = rng.sample(WORDS["animals"], 2)
    relative = rng.choice(WORDS["relatives"])
    words = {"a": a, "b": b, "animal": animal, "animal2": animal2, "relative": relative}
    words |= {kind: rng.choice(WORDS[choices]) for kind, choices in _DATA["cast"].items()}
    for name, suffix in ((a, ""), (b, "2")):
        pronouns = ("she", "her", "her") if name in WORDS["girls"] else ("he", "him", "his")
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


def story(plot: dict[str, Any], words: dict[str, str], rng: random.Random) -> str:
    """Tell a story: its sentences, filled in, in one paragraph."""
    return " ".join(fill(sentence, words, rng) for sentence in plot["sentences"])


def tell_story(rng: random.Random) -> Turn:
    """A wish for a story, the story, and questions about it."""
    plot, words = rng.choice(PLOTS), cast(rng)
    text = CHOICE.sub("", " ".join(plot["sentences"]))  # what is in every wording
    subjects = [
        plot["about"],
        plot["about"],
        *(s for s in _SUBJECTS if all(name in text for name in _NAMES.findall(s))),
    ]
    subject = rng.choice(subjects)
    names = [name.strip("{}") for name in _NAMES.findall(subject)]
    required = tuple(words[name] for name in names if name not in _PRONOUNS)
    request = rng.choice(_STORY_REQUESTS) if subject else "Tell me a story."
    question = fill(request, {"subject": subject.format_map(words)}, rng)
    follow_ups = tuple(
        Turn(fill(question, words, rng), fill(answer, words, rng), (), (words.get(key[1:-1], key),))
        for question, answer, key in rng.sample(plot["questions"], rng.randint(0, 2))
    )
    return Turn(question, story(plot, words, rng), ("story", *required), required, follow_ups)


def answer_about_text(rng: random.Random) -> Turn:
    """Up to three sentences of the same form, and a question about one of them."""
    fact = rng.choice(_DATA["facts"])
    kinds = {
        "name": NAMES,
        "toy": WORDS["toys"],
        "place": [*PLACES, *WORDS["hiding_places"]],
        "color": WORDS["colors"],
        "food": _EATABLE,
    }
    rows = zip(*(rng.sample(choices, 3) for choices in kinds.values()), strict=True)
    facts = [_fill_fact(fact, dict(zip(kinds, row, strict=True)), rng) for row in rows][: rng.randint(1, 3)]
    _, question, answer, asked = rng.choice(facts)
    return Turn(" ".join([*(text for text, *_ in facts), question]), answer, ("text", *asked), (asked[-1],))


def _fill_fact(
    fact: dict[str, Any], words: dict[str, str], rng: random.Random
) -> tuple[str, str, str, tuple[str, ...]]:
    """A sentence, a question about it, the answer, and the words of both; the question asks for the last one."""
    text, questions = fill(fact["text"], words, rng), fact["questions"]
    question, answer, asked = rng.choice(questions) if len(questions) > 1 else questions[0]
    return text, fill(question, words, rng), fill(answer, words, rng), _words(asked, words)


def _words(templates: list[str], words: dict[str, str]) -> tuple[str, ...]:
    return tuple(template.format_map(words) for template in templates)


def calculate(rng: random.Random, sign: int) -> Turn:
    """A sum of two numbers, counted up step by step, or (with `sign` -1) a difference, counted down."""
    names = ("sum", "plus", "+", "more") if sign > 0 else ("difference", "minus", "-", "less")
    kind, word, symbol, counted = names
    a = rng.randint(0, MAX_NUMBER - (sign > 0))
    b = rng.randint(0, min(10, MAX_NUMBER - a if sign > 0 else a))
    wordings = f"[What is {a} {word} {b}?|What is {a} {symbol} {b}?|How much is {a} {word} {b}?]"
    steps = ", ".join(str(a + sign * i) for i in range(1, b + 1))
    result = f"The answer is {a + sign * b}"
    answer = f"{a} and {b} {counted}{f': {steps}' if steps else ''}. {result}."
    return Turn(fill(wordings, {}, rng), answer, (kind, str(a), str(b)), (result,))


def sort_numbers(rng: random.Random) -> Turn:
    """Three or four numbers, from small to large."""
    numbers = rng.sample(range(MAX_NUMBER + 1), rng.randint(3, 4))
    words = {"numbers": ", ".join(map(str, numbers))}
    question = fill("[Sort these numbers: {numbers}.|Sort {numbers}.|Put these in order: {numbers}.]", words, rng)
    ordered = f"{', '.join(map(str, sorted(numbers)))}."
    return Turn(question, ordered, ("sort", *map(str, numbers)), (ordered,))


def spell(rng: random.Random) -> Turn:
    """The letters of a compound word, or of a part of one."""
    parts = [rng.choice(WORDS["first_parts"]), rng.choice(WORDS["last_parts"])]
    if rng.random() < 0.3:
        parts = [rng.choice(parts)]
    word = "".join(parts)
    question = fill("[How do you spell {word}?|Spell {word}.|Please spell the word {word}.]", {"word": word}, rng)
    spelled = f"spelled {' '.join(word)}."
    return Turn(question, f"It is {spelled}", ("spell", word) if len(parts) > 1 else (), (spelled,))


def opposite(rng: random.Random) -> Turn:
    """The opposite of a word, or of a thing with an adjective."""
    alone = rng.random() < 0.3
    pairs = WORDS["opposites"] | (WORDS["other_opposites"] if alone else {})
    word, other = rng.choice([*pairs.items(), *((b, a) for a, b in pairs.items())])
    if alone:
        return Turn(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.", (), (other,))
    thing = rng.choice(WORDS["things"])
    question, answer = f"What is the opposite of a {word} {thing}?", f"It is a {other} {thing}."
    return Turn(correct_articles(question), correct_articles(answer), ("opposite", word, thing), (other, thing))


def repeat(rng: random.Random) -> Turn:
    """Some words to repeat. A model that learns to copy early learns everything else sooner."""
    words = rng.sample(_WORDS, rng.randint(1, 5))
    said = " ".join(words)
    question = fill("[Say: {said}.|Say after me: {said}.|Please repeat: {said}.]", {"said": said}, rng)
    return Turn(question, f"You said: {said}.", ("repeat", *words), (f"said: {said}.",))


def sound(rng: random.Random) -> Turn:
    """What an animal says."""
    animal = rng.choice(list(WORDS["sounds"]))
    name, sound = rng.choice(NAMES), WORDS["sounds"][animal]
    if rng.random() < 0.4:
        question, answer = f"What does a {animal} say?", f"A {animal} says {sound}."
        return Turn(correct_articles(question), correct_articles(answer), (), (sound,))
    question = correct_articles(f"{rng.choice(('', 'My friend '))}{name} has a {animal}. What does it say?")
    return Turn(question, f"The {animal} of {name} says {sound}.", ("sound", name, animal), (sound,))


def introduce(rng: random.Random) -> Turn:
    """Somebody says a name, and what they like or have."""
    choices = {"name": NAMES, "animal": WORDS["animals"], "thing": _EATABLE, "hello": _DATA["greetings"]}
    words = {kind: rng.choice(words) for kind, words in choices.items()}
    question, answer, combination = rng.choice(_DATA["introductions"])
    combination = _words(combination, words)
    asked = Turn("What is my name?", f"Your name is {words['name']}.", (), (words["name"],))
    follow_ups = rng.choice(((), (asked,)))
    return Turn(fill(question, words, rng), fill(answer, words, rng), combination, combination[1:], follow_ups)


def small_talk(rng: random.Random) -> Turn:
    """Greetings, thanks, and what the model can do."""
    words = {"thing": rng.choice(_EATABLE), "hello": rng.choice(_DATA["greetings"])}
    return rng.choice([
        Turn(fill(question, words, rng), fill(answer, words, rng), (), _words(required, words))
        for question, answer, required in _DATA["small_talk"]
    ])  # fmt: skip


def unknown(rng: random.Random) -> Turn:
    """A question about the larger world, which the model says that it can't answer."""
    return Turn(rng.choice(_UNKNOWN), "I do not know that. I know stories, small sums, spelling and opposites.", (), ())


_EATABLE = [*WORDS["foods"], *WORDS["fruits"]]
_NOUNS = (word for kind in ("toys", "colors", "animals", "fruits", "things") for word in WORDS[kind])
_WORDS = sorted({*NAMES, *_NOUNS, *map(str, range(MAX_NUMBER + 1))})
_COUNTRIES, _TOPICS = _DATA["countries"], [*_DATA["countries"], *_DATA["topics"]]
_UNKNOWN = [
    *(f"What is the capital of {country}?" for country in _COUNTRIES),
    *(f"How many people live in {country}?" for country in _COUNTRIES),
    *(f"Tell me about {subject}." for subject in _TOPICS),
    *(f"What do you know about {subject}?" for subject in _TOPICS),
    *_DATA["unknown"],
]

# Each kind with its weight in the corpus.
KINDS: dict[str, tuple[Callable[[random.Random], Turn], float]] = {
    "stories": (tell_story, 0.13),
    "questions about a text": (answer_about_text, 0.21),
    "sums": (partial(calculate, sign=1), 0.1),
    "differences": (partial(calculate, sign=-1), 0.05),
    "sorting": (sort_numbers, 0.08),
    "spelling": (spell, 0.08),
    "opposites": (opposite, 0.08),
    "repeating": (repeat, 0.09),
    "animal sounds": (sound, 0.06),
    "names": (introduce, 0.07),
    "small talk": (small_talk, 0.04),
    "unknown": (unknown, 0.02),
}
