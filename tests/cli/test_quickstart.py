"""`mlxlm quickstart`."""

import json
from types import SimpleNamespace

import pytest

from mlxlm.cli import quickstart as module
from mlxlm.cli.main import _run
from mlxlm.cli.quickstart import Answers, Preview, held_out_prompts
from tests.cli.helpers import error_line


@pytest.fixture
def hasty(tmp_path, monkeypatch):
    """Training that ends after a step, in an empty folder."""
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 0.06)  # too little to learn anything
    monkeypatch.setattr("mlxlm.train.budget.measure_matmul", lambda **options: 50.0)
    for name in ("_MIN_TOKENS", "_MIN_STEPS"):
        monkeypatch.setattr(f"mlxlm.train.budget.{name}", 0)
    monkeypatch.setattr("mlxlm.cli.quickstart._QUESTIONS_PER_KIND", 1)
    monkeypatch.setattr("mlxlm.cli.quickstart.SMALL_WORLD_BYTES", 200_000)
    monkeypatch.setattr("mlxlm.evaluate.small_world._MAX_TOKENS", 8)
    monkeypatch.setattr("mlxlm.cli.quickstart._MAX_TOKENS", {True: 8, False: 8})
    monkeypatch.chdir(tmp_path)


def quickstart(*arguments):
    return _run(["quickstart", *arguments, "--minutes", "0.001"])


def config(folder):
    return json.loads((folder / "4bit/config.json").read_text())


@pytest.mark.usefixtures("hasty")
def test_the_built_in_corpus_ends_with_answers_scores_and_commands(tmp_path, capsys):
    assert quickstart() == 0
    out, err = capsys.readouterr()
    assert "at the end" in out and "of 1\n" in out and "sums" in out
    for command in ("mlxlm chat mlxlm-quickstart/4bit", "--json-schema", "mlxlm serve mlxlm-quickstart/4bit"):
        assert command in err
    settings = json.loads((tmp_path / "mlxlm-quickstart/4bit/generation_config.json").read_text())
    assert settings["temperature"] == 0.4 and settings["example_prompt"] == held_out_prompts()[0]


@pytest.mark.usefixtures("hasty")
def test_a_short_text_gets_a_smaller_vocabulary_and_context(tmp_path, capsys):
    (tmp_path / "simple.txt").write_text("The cat sat on the mat.\n" * 120)
    (tmp_path / "longer.txt").write_text("The cat sat on the mat.\n" * 2000)
    for name in ("simple.txt", "longer.txt"):
        assert quickstart(name) == 0
        assert "The cat sat on" in capsys.readouterr().out
    short, long = config(tmp_path / "mlxlm-quickstart"), config(tmp_path / "mlxlm-quickstart-2")
    assert 263 < short["vocab_size"] <= 320 and short["max_position_embeddings"] == 64
    assert 263 < long["vocab_size"] < 512 and long["max_position_embeddings"] == 128


def test_prompts_are_first_questions_or_first_words(tmp_path):
    text, chats = tmp_path / "text.txt", tmp_path / "chats.jsonl"
    text.write_text("one two three four five six seven eight nine\n" * 50 + "x")
    size, has_conversations, prompts = Preview.read([str(text)], "stop")
    assert (size, has_conversations) == (2251, False)
    assert prompts[0] == "one two three four" and all(len(prompt.split()) == 4 for prompt in prompts)
    lines = [
        {"messages": [{"role": "user", "content": f"Question\n{i}?"}, {"role": "assistant", "content": "Yes. " * 99}]}
        for i in range(9)
    ]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Preview.read([str(chats)], "stop")[1:] == (True, ["Question 0?", "Question 3?", "Question 6?"])


def test_answers_are_taken_at_a_twelfth_and_a_third_of_the_time(monkeypatch, capsys):
    clock = iter([0, 5, 10.5, 10.5, 30, 45, 45])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    answers = Answers(["Hello"], 120)
    monkeypatch.setattr(answers, "_answer", lambda lm: [f"[b]{lm}[/b]"])
    for number in (1, 2, 3, 4):
        answers.after_step(SimpleNamespace(step=number, steps=9), f"model {number}")
    answers.after_step(SimpleNamespace(step=5, steps=9), "model 5")
    answers.finish("model 6")
    answers.print()
    out = capsys.readouterr().out
    assert [f"model {i}" in out for i in (1, 2, 3, 4, 5, 6)] == [False, True, False, True, False, True]
    assert "after 10s" in out and "after 45s" in out and "[b]model 6[/b]" in out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("Hello there.\n", "13 characters are too few"),
        ("The cat sat. " * 80, "are too few to learn"),
        (f"{'a' * 2000}\n" * 10, "less than one sequence of 128 (try: more text"),
        ("\n" * 20_000, "no text to train a tokeniz"),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_too_little_text(text, problem, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    line = error_line("quickstart", "text.txt", "--minutes", "0.001")
    assert problem in line and "--" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
