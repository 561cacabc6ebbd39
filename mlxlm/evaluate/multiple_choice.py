"""Multiple-choice evaluation: the choice with the highest likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.config.numbers import is_int
from mlxlm.evaluate.loglikelihood import Loglikelihood, LoglikelihoodScorer
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import read_json_lines

_EXAMPLE = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1} on each line'


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        line: In its file, from 1.
        question: Text.
        choices: Texts, two or more.
        answer: Index of the correct choice, from 0.
        location: File and line, for error messages.
    """

    line: int
    question: str
    choices: list[str]
    answer: int
    location: str


@dataclass(frozen=True)
class ChoiceResult:
    """The model's answer to a question.

    Attributes:
        line: Of the question.
        answer: Index of the correct choice.
        predicted: Index of the most likely choice.
        predicted_by_bytes: The same by log-probability per UTF-8 byte, since longer choices are less likely.
        logprobs: Natural log-probability of each choice.
    """

    line: int
    answer: int
    predicted: int
    predicted_by_bytes: int
    logprobs: list[float]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over questions, from 0 to 1.

    Attributes:
        questions: Number of questions.
        accuracy: By log-probability (lm-eval's acc).
        accuracy_by_bytes: By log-probability per byte (lm-eval's acc_bytes; its acc_norm divides by characters, which
            is the same for ASCII).
        random_accuracy: Of random guesses.
    """

    questions: int
    accuracy: float
    accuracy_by_bytes: float
    random_accuracy: float

    @classmethod
    def of(cls, results: Sequence[ChoiceResult]) -> Accuracy:
        """Compute the accuracy of results. Raises DataError if there are none."""
        if not results:
            raise DataError("there are no questions", _EXAMPLE)
        n = len(results)
        return cls(
            n,
            sum(result.predicted == result.answer for result in results) / n,
            sum(result.predicted_by_bytes == result.answer for result in results) / n,
            math.fsum(1 / len(result.logprobs) for result in results) / n,
        )

    def stderr(self, accuracy: float) -> float:
        """The standard error of one of the accuracies; NaN for a single question."""
        return math.sqrt(accuracy * (1 - accuracy) / (self.questions - 1)) if self.questions > 1 else math.nan


def read_questions(path: Path | str, advance: Callable[[int], None] = lambda _: None) -> Iterator[Question]:
    """Read questions from JSON lines.

    Each line is {"question": ..., "choices": [...], "answer": index from 0}; other fields are ignored.

    Args:
        path: File of JSON lines; empty lines are skipped.
        advance: Called with the number of bytes of each line.

    Raises:
        DataError: A line is malformed; the message names it.
    """
    for number, location, value in read_json_lines(path, DataError, _EXAMPLE, advance):
        yield _parse_question(value, number, location)


def evaluate_multiple_choice(lm: LoadedModel, questions: Iterable[Question]) -> Iterator[ChoiceResult]:
    """Yield the model's choice for each question; ties go to the first choice.

    A space joins question and choice unless there is white space. Both are encoded together; white space between them
    belongs to the choice, as does a token that starts in the question and ends in the choice.

    Raises:
        DataError: A question with a choice is longer than the model's context; the message names the line.
    """
    scorer = LoglikelihoodScorer(lm)
    for question in questions:
        try:
            scores = score_choices(lm, scorer, question.question, question.choices)
        except DataError as error:
            raise error.prefixed(question.location) from None
        logprobs = [score.logprob for score in scores]
        sizes = [len(choice.encode("utf-8")) for choice in question.choices]
        by_bytes = [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
        predicted, predicted_by_bytes = logprobs.index(max(logprobs)), by_bytes.index(max(by_bytes))
        yield ChoiceResult(question.line, question.answer, predicted, predicted_by_bytes, logprobs)


def score_choices(
    lm: LoadedModel, scorer: LoglikelihoodScorer, question: str, choices: Sequence[str]
) -> list[Loglikelihood]:
    """Score each choice as the continuation of a question, see `evaluate_multiple_choice`.

    Raises:
        DataError: The question with a choice is longer than the model's context.
    """
    # Prompts can differ, since a token that continues into a choice belongs to that choice.
    prompts: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for i, choice in enumerate(choices):
        prompt, continuation = _encode(lm, question, choice)
        prompts.setdefault(tuple(prompt), {})[i] = continuation
    scores: dict[int, Loglikelihood] = {}
    for shared, continuations in prompts.items():
        scores |= zip(continuations, scorer.score(shared, list(continuations.values())), strict=True)
    return [scores[i] for i in range(len(choices))]


def _encode(lm: LoadedModel, question: str, choice: str) -> tuple[list[int], list[int]]:
    """Token ids of the question, and of the choice after it."""
    separator = "" if question[-1].isspace() or choice[0].isspace() else " "
    prompt = lm.tokenizer.encode(question.rstrip())
    ids = lm.tokenizer.encode(question + separator + choice)
    limit = lm.config.max_position_embeddings
    if len(ids) > limit:
        message = f"question and choice have {len(ids)} tokens, and the model's context {limit}"
        raise DataError(message, "a shorter question, or a model with more context")
    split = common_prefix_length(prompt, ids)
    if split == 0:
        raise DataError("the question has no token before a choice", "a longer question")
    return ids[:split], ids[split:]


def _parse_question(row: dict[str, Any], line: int, location: str) -> Question:
    question, choices, answer = (row.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(question, str) or not question:
        raise DataError(f"{location}: 'question' is not a text", _EXAMPLE)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f"{location}: 'choices' is not a list of two texts or more", _EXAMPLE)
    if not is_int(answer) or not 0 <= answer < len(choices):
        raise DataError(f"{location}: 'answer' is not an index from 0 to {len(choices) - 1}", _EXAMPLE)
    return Question(line, question, choices, answer, location)
