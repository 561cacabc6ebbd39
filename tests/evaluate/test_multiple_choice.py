"""Choices against sums over single tokens; lines that can't be questions; the command."""

import json
import math
from dataclasses import replace

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.evaluate import loglikelihood
from mlxlm.evaluate.loglikelihood import LoglikelihoodScorer
from mlxlm.evaluate.multiple_choice import Accuracy, ChoiceResult, Question, evaluate_multiple_choice, read_questions
from mlxlm.utils.errors import CheckpointError, DataError
from tests.run_command import run_command

SHOT = "The quick brown fox jumps over the lazy dog. "


def question(text, choices, right=0):
    return Question(1, text, choices, right, "file, line 1")


@pytest.mark.parametrize("supports_batching", [True, False])
def test_logprobs_equal_those_of_the_whole_text(lm, logprobs, supports_batching, monkeypatch):
    monkeypatch.setattr(loglikelihood, "_MAX_LOGITS", 4 * 300)  # one to four columns at a time

    class Alone:
        supports_batching = False
        layers, config = lm.model.layers, lm.config

        def __call__(self, ids, cache=None):
            return lm.model(ids, cache=cache)

    model = lm if supports_batching else replace(lm, model=Alone())
    scorer = LoglikelihoodScorer(model)
    encode = lm.tokenizer.encode
    prompts = [encode(SHOT * 2 + "How are"), encode(SHOT * 2 + "Grüße"), encode("a")[:1], encode(SHOT)]
    for prompt in prompts:
        likeliest = int(lm.model(mx.array([prompt]))[0, -1].argmax().item())
        rows = [[likeliest], [5, 6, 7], [260], list(range(30, 60))]
        found = scorer.score(prompt, rows)
        for row, likelihood in zip(rows, found, strict=True):
            logs, best = logprobs([*prompt, *row])
            assert likelihood.logprob == pytest.approx(logs[-len(row) :].sum(), rel=1e-4, abs=2e-3)
            assert likelihood.is_greedy == best[-len(row) :].all()
        assert found[0].is_greedy


def test_shared_prefix_is_computed_once(lm):
    read = []

    class Counting:
        supports_batching = True
        layers, config = lm.model.layers, lm.config

        def __call__(self, ids, cache=None):
            read.append(ids.size)
            return lm.model(ids, cache=cache)

    few_shot = SHOT * 3
    questions = [question(f"{few_shot}{end}", ["you", "lazy"]) for end in ("How are", "Where are", "Who are")]
    list(evaluate_multiple_choice(replace(lm, model=Counting()), questions))
    length = len(lm.tokenizer.encode(few_shot))
    assert length < sum(read) < length + 3 * 30


def test_predictions_by_sum_and_by_byte(lm, logprobs):
    asked = question(SHOT + "How are", ["you", "you today? How are you today? How are you", " dog", "世"], 1)
    [found] = evaluate_multiple_choice(lm, [asked])
    expected = []
    for choice, between in zip(asked.choices, [" ", " ", "", " "], strict=True):
        ids = lm.tokenizer.encode(asked.question + between + choice)
        n = len(lm.tokenizer.encode(asked.question))
        assert ids[:n] == lm.tokenizer.encode(asked.question)
        expected.append(logprobs(ids)[0][n - 1 :].sum())
    assert found.logprobs == pytest.approx(expected, rel=1e-4)
    by_bytes = [value / len(choice.encode()) for value, choice in zip(expected, asked.choices, strict=True)]
    assert found.predicted == max(range(4), key=expected.__getitem__)
    assert (
        found.predicted_by_bytes == max(range(4), key=by_bytes.__getitem__)
        and found.predicted != found.predicted_by_bytes
    )


def test_white_space_belongs_to_the_choice(lm, logprobs):
    # White space is the choice's, wherever it is written.
    prompt, together = (lm.tokenizer.encode(text) for text in ("The quick br", "The quick br own fox"))
    assert together[: len(prompt)] == prompt
    expected = logprobs(together)[0][len(prompt) - 1 :].sum()
    for text, choice in (("The quick br ", "own fox"), ("The quick br", " own fox"), ("The quick br", "own fox")):
        [found] = evaluate_multiple_choice(lm, [question(text, [choice, "lazy"])])
        assert found.logprobs[0] == pytest.approx(expected, rel=1e-4)
    merged = lm.tokenizer.encode("The\n\tquick")
    [found] = evaluate_multiple_choice(lm, [question("The\n", ["\tquick", " x"])])
    cut = len(lm.tokenizer.encode("The"))
    assert merged[:cut] == lm.tokenizer.encode("The")
    assert found.logprobs[0] == pytest.approx(logprobs(merged)[0][cut - 1 :].sum(), rel=1e-4)


def test_accuracy():
    right = [ChoiceResult(1, 0, 0, 1, [-1.0, -2.0]), ChoiceResult(2, 1, 1, 1, [0.0] * 4)]
    wrong = [ChoiceResult(3, 0, 1, 1, [-1.0, -2.0]), ChoiceResult(4, 0, 1, 0, [0.0] * 4)]
    found = Accuracy.of(right + wrong)
    assert (found.questions, found.accuracy, found.accuracy_by_bytes, found.random_accuracy) == (4, 0.5, 0.5, 0.375)
    assert found.stderr(0.5) == pytest.approx(math.sqrt(0.25 / 3)) and math.isnan(Accuracy.of(right[:1]).stderr(1.0))
    with pytest.raises(DataError, match="no question"):
        Accuracy.of([])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"question": "", "choices": ["a", "b"], "answer": 0}', "'question' is not a text"),
        ('{"question": 3, "choices": ["a", "b"], "answer": 0}', "'question' is not a text"),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "'choices' is not a list of two"),
        ('{"question": "q", "choices": ["a", ""], "answer": 0}', "'choices' is not"),
        ('{"question": "q", "choices": "ab", "answer": 0}', "'choices' is not"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "'answer' is not an index from 0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": -1}', "'answer' is not"),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', "'answer' is not"),
        ('{"question": "q", "choices": ["a", "b"]}', "'answer' is not"),
    ],
)
def test_malformed_lines(tmp_path, line, message):
    good = '{"question": "q", "choices": ["a", "b"], "answer": 1, "id": 7}'
    path = tmp_path / "q.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    questions = read_questions(path)
    assert next(questions) == Question(1, "q", ["a", "b"], 1, f"{path}, line 1")
    with pytest.raises(DataError, match=f"q.jsonl, line 3.*{message}"):
        next(questions)


def test_too_long_questions_and_nan_logits(lm):
    with pytest.raises(DataError, match="line 1: question and choice have .* context 128"):
        list(evaluate_multiple_choice(lm, [question(SHOT * 20, ["a", "b"])]))

    class Broken:
        supports_batching = True
        layers, config = lm.model.layers, lm.config

        def __call__(self, ids, cache=None):
            return lm.model(ids, cache=cache) * mx.nan

    with pytest.raises(CheckpointError, match="logits are NaN"):
        list(evaluate_multiple_choice(replace(lm, model=Broken()), [question("q", ["a", "b"])]))


def test_command(folder, tmp_path):
    (tmp_path / "a.txt").write_text("How are you?\n" * 9)
    done = run_command(
        "evaluate",
        folder,
        tmp_path / "a.txt",
        "-",
        "--json",
        "--context-length",
        32,
        "--stride",
        8,
        stdin="Grüße!".encode(),
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    parts = found["texts"]
    assert set(parts) == {str(tmp_path / "a.txt"), "stdin"}
    assert found["bytes"] == sum(part["bytes"] for part in parts.values()) == 13 * 9 + len("Grüße!".encode())
    assert found["loss"] == pytest.approx(sum(part["nats"] for part in parts.values()) / found["tokens"])
    lines = [{"question": "How are", "choices": ["you", "fox", "世"], "answer": i % 3} for i in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_command(
        "evaluate", folder, "--multiple-choice", tmp_path / "q.jsonl", "--json", "--out", tmp_path / "out.jsonl"
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["questions"] == 6 and found["accuracy"] == pytest.approx(1 / 3)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == found["results"] and [row["line"] for row in written] == list(range(1, 7))
    assert run_command("evaluate", folder, "--multiple-choice", tmp_path / "q.jsonl").stdout.startswith(b"6 questions")


def test_usage(folder):
    from click.testing import CliRunner

    from mlxlm.cli.evaluate import evaluate

    for arguments, message in (
        ([], "there is nothing to evaluate"),
        (["a.txt", "--multiple-choice", "q.jsonl"], "TEXT and --multiple-choice can't be combined"),
        (["a.txt", "--out", "x"], "--out would have no effect"),
        (
            ["--multiple-choice", "q.jsonl", "--stride", "3", "--context-length", "4"],
            "--context-length and --stride would have no effect",
        ),
    ):
        found = CliRunner().invoke(evaluate, [str(folder), *arguments])
        assert found.exit_code == 2 and message in found.output
