"""The kinds of questions in the small world, each with its answers and what a right answer must contain.

`small_world.json` has its words and the plots of its stories. The words are few, so that a model learns to tell them
apart within minutes, and combine to far more than it can memorize. A plot says what the story is about, and has
sentences, and questions with their answers and the word that a right answer contains. In its texts, `[one|two]` is a
choice of wording and `{name}` a word of the `cast`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_DATA = json.loads(Path(__file__).with_name("small_world.json").read_text("utf-8"))
WORDS, PLOTS = _DATA["words"], _DATA["plots"]
NAMES: list[str] = WORDS["girls"] + WORDS["boys"]

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
    kinds = {
        "toy": WORDS["toys"],
        "color": WORDS["colors"],
        "place": WORDS["places"],
        "outside": WORDS["places"][4:],
        "pet": WORDS["pets"],
    }
    kinds |= {
        "hiding": WORDS["hiding_places"],
        "food": WORDS["foods"],
        "fruit": WORDS["fruits"],
        "flower": WORDS["flowers"],
        "petname": WORDS["pet_names"],
    }
    words |= {kind: rng.choice(choices) for kind, choices in kinds.items()}
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
    fact = rng.choice((_place_of_thing, _place_of_person, _owner, _likes, _eaten))
    lists = (
        NAMES,
        WORDS["toys"],
        [*WORDS["places"], *WORDS["hiding_places"]],
        WORDS["colors"],
        [*WORDS["foods"], *WORDS["fruits"]],
    )
    words = zip(*(rng.sample(choices, 3) for choices in lists), strict=True)
    facts = [fact(rng, *row) for row in words][: rng.randint(1, 3)]
    asked = rng.choice(facts)
    text = " ".join([*(fact.text for fact in facts), asked.question])
    return Turn(text, asked.answer, ("text", *asked.words), (asked.words[-1],))


class _Fact(NamedTuple):
    """A sentence with a question about it; the last of the words is what the question asks for."""

    text: str
    question: str
    answer: str
    words: tuple[str, ...]


def _place_of_thing(rng: random.Random, name: str, toy: str, place: str, _color: str, _food: str) -> _Fact:
    verb = rng.choice(("put", "left"))
    return _Fact(
        f"{name} {verb} the {toy} {place}.", f"Where is the {toy}?", f"The {toy} is {place}.", (name, toy, place)
    )


def _place_of_person(rng: random.Random, name: str, _toy: str, place: str, _color: str, _food: str) -> _Fact:
    verb = rng.choice(("is", "sits", "stands"))
    return _Fact(f"{name} {verb} {place}.", f"Where is {name}?", f"{name} is {place}.", (name, place))


def _owner(rng: random.Random, name: str, toy: str, _place: str, color: str, _food: str) -> _Fact:
    text = f"{name} {rng.choice(('has', 'got'))} a {color} {toy}."
    return rng.choice(
        (
            _Fact(text, f"Who has the {toy}?", f"The {toy} belongs to {name}.", (toy, name)),
            _Fact(text, f"What color is the {toy}?", f"The {toy} is {color}.", (toy, color)),
            _Fact(text, f"What does {name} have?", f"{name} has a {color} {toy}.", (name, color, toy)),
        )
    )


def _likes(_rng: random.Random, name: str, _toy: str, _place: str, _color: str, food: str) -> _Fact:
    return _Fact(f"{name} likes {food}.", f"What does {name} like?", f"{name} likes {food}.", (name, food))


def _eaten(_rng: random.Random, name: str, _toy: str, _place: str, _color: str, food: str) -> _Fact:
    return _Fact(f"{name} ate the {food}.", f"What did {name} eat?", f"{name} ate the {food}.", (name, "ate", food))


def add(rng: random.Random) -> Turn:
    """A sum of two numbers, counted up step by step."""
    a = rng.randint(0, MAX_NUMBER - 1)
    b = rng.randint(0, min(10, MAX_NUMBER - a))
    question = rng.choice((f"What is {a} plus {b}?", f"What is {a} + {b}?", f"How much is {a} plus {b}?"))
    steps = ", ".join(str(a + i) for i in range(1, b + 1))
    answer = f"{a} and {b} more: {steps}. The answer is {a + b}." if b else f"{a} and 0 more. The answer is {a}."
    return Turn(question, answer, ("sum", str(a), str(b)), (f"The answer is {a + b}",))


def subtract(rng: random.Random) -> Turn:
    """A difference of two numbers, counted down step by step."""
    a = rng.randint(0, MAX_NUMBER)
    b = rng.randint(0, min(10, a))
    question = rng.choice((f"What is {a} minus {b}?", f"What is {a} - {b}?", f"How much is {a} minus {b}?"))
    steps = ", ".join(str(a - i) for i in range(1, b + 1))
    answer = f"{a} and {b} less: {steps}. The answer is {a - b}." if b else f"{a} and 0 less. The answer is {a}."
    return Turn(question, answer, ("difference", str(a), str(b)), (f"The answer is {a - b}",))


def sort_numbers(rng: random.Random) -> Turn:
    """Three or four numbers, from small to large."""
    numbers = rng.sample(range(MAX_NUMBER + 1), rng.randint(3, 4))
    words = ", ".join(map(str, numbers))
    question = rng.choice((f"Sort these numbers: {words}.", f"Sort {words}.", f"Put these in order: {words}."))
    ordered = ", ".join(map(str, sorted(numbers)))
    return Turn(question, f"{ordered}.", ("sort", *map(str, numbers)), (f"{ordered}.",))


def spell(rng: random.Random) -> Turn:
    """The letters of a compound word, or of a part of one."""
    parts = [rng.choice(WORDS["first_parts"]), rng.choice(WORDS["last_parts"])]
    if rng.random() < 0.3:
        parts = [rng.choice(parts)]
    word = "".join(parts)
    question = rng.choice((f"How do you spell {word}?", f"Spell {word}.", f"Please spell the word {word}."))
    letters = " ".join(word)
    return Turn(
        question, f"It is spelled {letters}.", ("spell", word) if len(parts) > 1 else (), (f"spelled {letters}.",)
    )


def opposite(rng: random.Random) -> Turn:
    """The opposite of a word, or of a thing with an adjective."""
    if rng.random() < 0.3:
        pairs = WORDS["opposites"] | WORDS["other_opposites"]
        word, other = rng.choice([*pairs.items(), *((b, a) for a, b in pairs.items())])
        return Turn(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.", (), (other,))
    word, other = rng.choice([*WORDS["opposites"].items(), *((b, a) for a, b in WORDS["opposites"].items())])
    thing = rng.choice(WORDS["things"])
    return Turn(
        correct_articles(f"What is the opposite of a {word} {thing}?"),
        correct_articles(f"It is a {other} {thing}."),
        ("opposite", word, thing),
        (other, thing),
    )


def repeat(rng: random.Random) -> Turn:
    """Some words to repeat. A model that learns to copy early learns everything else sooner."""
    words = " ".join(rng.sample(_WORDS, rng.randint(1, 5)))
    question = rng.choice((f"Say: {words}.", f"Say after me: {words}.", f"Please repeat: {words}."))
    return Turn(question, f"You said: {words}.", ("repeat", *words.split()), (f"said: {words}.",))


def sound(rng: random.Random) -> Turn:
    """What an animal says."""
    animal = rng.choice(list(WORDS["sounds"]))
    name = rng.choice(NAMES)
    if rng.random() < 0.4:
        question = correct_articles(f"What does a {animal} say?")
        return Turn(
            question, correct_articles(f"A {animal} says {WORDS['sounds'][animal]}."), (), (WORDS["sounds"][animal],)
        )
    question = correct_articles(f"{rng.choice(('', 'My friend '))}{name} has a {animal}. What does it say?")
    return Turn(
        question,
        f"The {animal} of {name} says {WORDS['sounds'][animal]}.",
        ("sound", name, animal),
        (WORDS["sounds"][animal],),
    )


def introduce(rng: random.Random) -> Turn:
    """Somebody says a name, and what they like or have."""
    name, animal, thing = (
        rng.choice(NAMES),
        rng.choice(WORDS["animals"]),
        rng.choice([*WORDS["foods"], *WORDS["fruits"]]),
    )
    hello = rng.choice(("Hello", "Hi", "Good morning", "Hey"))
    asked = Turn("What is my name?", f"Your name is {name}.", (), (name,))
    question, answer, combination = rng.choice(
        (
            (f"{hello}, I am {name}.", f"Hello, {name}! Nice to meet you.", ("name", name)),
            (f"My name is {name}.", f"Nice to meet you, {name}!", ("name", name)),
            (
                f"I am {name} and I like {thing}.",
                f"Hello, {name}! What do you like about {thing}?",
                ("likes", name, thing),
            ),
            (
                correct_articles(f"I am {name} and I have a {animal}."),
                f"Hello, {name}! What is the name of your {animal}?",
                ("has", name, animal),
            ),
        )
    )
    return Turn(question, answer, combination, combination[1:], rng.choice(((), (asked,))))


def small_talk(rng: random.Random) -> Turn:
    """Greetings, thanks, and what the model can do."""
    thing = rng.choice([*WORDS["foods"], *WORDS["fruits"]])
    hello = rng.choice(("Hello", "Hi", "Good morning", "Hey"))
    return rng.choice(
        (
            Turn(f"{hello}!", rng.choice((f"{hello}! How are you?", f"{hello}! What can I do for you?")), (), (hello,)),
            Turn(f"{hello}! How are you?", "I am fine, thank you. How are you?", (), ("fine",)),
            Turn("Who are you?", "I am a very small language model. I live on this computer.", (), ("small",)),
            Turn("What is your name?", "I have no name. I am a very small language model.", (), ("no name",)),
            Turn("What can you do?", _ABILITIES, (), ("stories",)),
            Turn("Help", _ABILITIES, (), ("stories",)),
            Turn("Thank you!", rng.choice(("You are welcome!", "I am happy to help.")), (), ()),
            Turn(f"Do you like {thing}?", f"I can not eat, but I like stories about {thing}.", (), (thing,)),
            Turn("I am sad.", "I am sorry. Do you want to hear a story?", (), ("sorry",)),
            Turn("I am happy.", "That is good to hear!", (), ("good",)),
            Turn("Goodbye!", "Goodbye! Come back soon.", (), ("Goodbye",)),
        )
    )


def unknown(rng: random.Random) -> Turn:
    """A question about the larger world, which the model says that it can't answer."""
    return Turn(rng.choice(_UNKNOWN), "I do not know that. I know stories, small sums, spelling and opposites.", (), ())


_WORDS = sorted(
    {
        *NAMES,
        *WORDS["toys"],
        *WORDS["colors"],
        *WORDS["animals"],
        *WORDS["fruits"],
        *WORDS["things"],
        *map(str, range(MAX_NUMBER + 1)),
    }
)
_ABILITIES = "I can tell stories, answer questions about them, add small numbers, spell words and find opposites."
_COUNTRIES = "France Spain Italy Germany Japan China India Brazil Canada Mexico Egypt Kenya Norway Poland".split()
_TOPICS = (
    "politics history computers Python music movies football chess planets physics money law medicine art religion war "
    "science cars cooking philosophy mathematics chemistry"
).split()
_UNKNOWN = (
    *(f"What is the capital of {country}?" for country in _COUNTRIES),
    *(f"How many people live in {country}?" for country in _COUNTRIES),
    *(f"Tell me about {subject}." for subject in (*_COUNTRIES, *_TOPICS)),
    *(f"What do you know about {subject}?" for subject in (*_COUNTRIES, *_TOPICS)),
    "Who is the president?",
    "What time is it?",
    "What day is today?",
    "How is the weather?",
    "Write a program.",
    "Who won the game?",
    "What is the meaning of life?",
    "What is love?",
    "Why is the sky blue?",
    "How far away is the moon?",
    "Who wrote this book?",
    "How old is the world?",
)

# Each kind with its weight in the corpus.
KINDS: dict[str, tuple[Callable[[random.Random], Turn], float]] = {
    "stories": (tell_story, 0.13),
    "questions about a text": (answer_about_text, 0.21),
    "sums": (add, 0.1),
    "differences": (subtract, 0.05),
    "sorting": (sort_numbers, 0.08),
    "spelling": (spell, 0.08),
    "opposites": (opposite, 0.08),
    "repeating": (repeat, 0.09),
    "animal sounds": (sound, 0.06),
    "names": (introduce, 0.07),
    "small talk": (small_talk, 0.04),
    "unknown": (unknown, 0.02),
}
