"""The built-in corpus: correct, reproducible, and without the combinations that it holds out."""

import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from mlxlm.cli.main import _run
from mlxlm.data.small_world.corpus import (
    EVALUATED_KINDS,
    conversations,
    held_out_questions,
    is_right,
    messages,
    write_small_world,
)
from mlxlm.data.small_world.tasks import Turn
from mlxlm.utils.errors import DataError


@cache
def turns(count=3000, seed=0):
    return [turn for conversation in islice(conversations(seed), count) for turn in conversation]


def test_every_answer_is_right_and_correct_english():
    for turn in turns():
        for text in (turn.question, turn.answer):
            assert not re.search(r"[{}\[\]|]|  | [.,!?]|\ba [aeiou]\w|^[ \"]*$", text), text
            assert text[-1] in '.!?"' or text == turn.question, text
            assert not re.search(r"[.!?] [a-z]", text), text
        if turn.combination:
            assert is_right(turn, turn.answer), turn


@pytest.mark.parametrize("kind", EVALUATED_KINDS)
def test_a_tenth_of_the_combinations_is_held_out(kind):
    held_out = list(islice(held_out_questions(kind), 40))
    assert len({turn.question for turn in held_out}) == len(held_out) >= 20
    assert all(turn.held_out and is_right(turn, turn.answer) for turn in held_out)
    combinations = {turn.combination for turn in turns(8_000) if turn.combination[:1] == held_out[0].combination[:1]}
    assert len(combinations) >= 20 and combinations.isdisjoint(turn.combination for turn in held_out)


def test_the_seed_chooses_the_conversations():
    first, again, other = (list(islice(conversations(seed), 20)) for seed in (0, 0, 1))
    assert first == again != other
    text = json.dumps([messages(conversation) for conversation in islice(conversations(), 500)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e938b5c913869ec3"  # of the receipts


@pytest.mark.parametrize(
    ("required", "question", "answer", "right"),
    [
        (("The answer is 12",), "What is 7 plus 5?", "7 and 5 more: 8, 9, 10, 11, 12. The answer is 12.", True),
        (("The answer is 12",), "What is 7 plus 5?", "The answer is 120.", False),
        (("spelled m i l k.",), "Spell milk.", "It is spelled m i l k.", True),
        (("spelled m i l k.",), "Spell milk.", "It is spelled m i l k y.", False),
        (("Anna",), "My name is Anna.", "Nice to meet you, Anna!", True),
        (("Anna",), "My name is Anna.", "Nice to meet you, Annabel!", False),
        (("Anna",), "My name is Anna.", "Nice to meet you, Anna and Ben!", False),
        ((), "Thank you!", "", True),
    ],
)
def test_what_is_right(required, question, answer, right):
    assert is_right(Turn(question, "", (), required), answer) is right


def test_a_story_has_at_most_two_people():
    turn = next(t for t in turns() if t.combination[:1] == ("story",) and {"Anna"} <= set(t.combination))
    turn = replace(turn, question="Tell me a story about Anna.", required=("Anna",))
    assert is_right(turn, "Anna met Ben.")
    assert not is_right(turn, "Anna met Ben and Tom.")
    assert not is_right(turn, "Ben met Tom.")


def test_the_file_has_conversations_of_the_size_asked_for(tmp_path):
    path = tmp_path / "small.jsonl"
    lengths = []
    write_small_world(path, 50_000, seed=3, progress=lengths.append)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lengths == [len(line) for line in lines]
    assert sum(lengths) - lengths[-1] < 50_000 <= path.stat().st_size == sum(lengths)
    expected = [messages(conversation) for conversation in islice(conversations(3), len(lines))]
    assert [json.loads(line)["messages"] for line in lines] == expected
    with pytest.raises(DataError, match="exists"):
        write_small_world(path, 50_000)


def test_the_command_writes_the_file(tmp_path, capsys):
    path = tmp_path / "stories.jsonl"
    assert _run(["prepare", "--builtin", "small-world", "--size", "20kB", "--seed", "1", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    again = tmp_path / "again.jsonl"
    write_small_world(again, 20_000, seed=1)
    assert path.read_bytes() == again.read_bytes()
