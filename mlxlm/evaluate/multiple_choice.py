"""Questions with choices: which of them a model finds likeliest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxlm.evaluate.loglikelihood import LoglikelihoodScorer
from mlxlm.generation.context import common_prefix_length
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import parse_json_object

_LONGEST = 1 << 24  # bytes of a line
_EXAMPLE = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1} on each line'


@dataclass(frozen=True)
class Question:
    """`answer` is the index of the right one of `choices`, from 0. `location`: file and line, for messages."""

    line: int
    question: str
    choices: list[str]
    answer: int
    location: str


@dataclass(frozen=True)
class ChoiceResult:
    """logprobs: of each choice behind the question (natural). chosen: the likeliest; chosen_by_bytes: the likeliest by
    log-probability per UTF-8 byte of the choice, since longer ones are less likely."""

    line: int
    answer: int
    predicted: int
    predicted_by_bytes: int
    logprobs: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Accuracy:
    """Shares of the questions. accuracy, accuracy_by_bytes: answered rightly, as `ChoiceResult` has it (lm-eval's acc and
    acc_bytes; its acc_norm divides by characters, which for ASCII is the same). chance: what guessing gives.
    """

    questions: int
    accuracy: float
    accuracy_by_bytes: float
    random_accuracy: float

    @classmethod
    def of(cls, answered: Sequence[ChoiceResult]) -> Accuracy:
        """Raises DataError for none."""
        if not answered:
            raise DataError("there is no question", _EXAMPLE)
        n = len(answered)
        return cls(
            n,
            sum(one.predicted == one.answer for one in answered) / n,
            sum(one.predicted_by_bytes == one.answer for one in answered) / n,
            math.fsum(1 / len(one.logprobs) for one in answered) / n,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def stderr(self, share: float) -> float:
        """The standard error of one of the shares; nan for a single question."""
        return math.sqrt(share * (1 - share) / (self.questions - 1)) if self.questions > 1 else math.nan


def read_questions(path: Path | str, advance: Callable[[int], None] = lambda _: None) -> Iterator[Question]:
    """Those of a file of JSON lines, {"question": ..., "choices": [...], "answer": index from 0}; other fields are left
    alone, and empty lines left out. `advance` is told the bytes of each line.

    Raises DataError naming the line.
    """
    path = Path(path)
    with open_regular(path, DataError) as file:
        number = 0
        while line := file.readline(_LONGEST + 1):
            number += 1
            location = f"{path}, line {number}"
            if len(line) > _LONGEST:
                raise DataError(f"{location} is longer than {_LONGEST} bytes", _EXAMPLE)
            advance(len(line))
            if line.strip():
                yield _question(parse_json_object(line, location, DataError, _EXAMPLE), number, location)


def evaluate_multiple_choice(lm: LoadedModel, questions: Iterable[Question]) -> Iterator[ChoiceResult]:
    """What the model chooses, question by question; ties go to the first choice.

    A space comes between question and choice where neither has white space there. Both are encoded together, white
    space between them is the choice's, and so is a token that begins in the question and ends in the choice. What all
    choices have before them is read once, and what the question before began with, too. Raises DataError, naming the
    line, for a question that with a choice is longer than the model's context.
    """
    continuations = LoglikelihoodScorer(lm)
    for question in questions:
        logprobs = _logprobs(lm, continuations, question)
        sizes = [len(choice.encode("utf-8")) for choice in question.choices]
        by_bytes = [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
        predicted, predicted_by_bytes = logprobs.index(max(logprobs)), by_bytes.index(max(by_bytes))
        yield ChoiceResult(question.line, question.answer, predicted, predicted_by_bytes, logprobs)


def _logprobs(lm: LoadedModel, continuations: LoglikelihoodScorer, question: Question) -> list[float]:
    texts = [_encoded(lm, question, choice) for choice in question.choices]
    # A token of the question that goes on in a choice is part of that choice: prompts can differ by it.
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(texts):
        prompts.setdefault(tuple(prompt), []).append(i)
    found = [0.0] * len(texts)
    for prompt, places in prompts.items():
        likelihoods = continuations.score(prompt, [texts[i][1] for i in places])
        for i, likelihood in zip(places, likelihoods, strict=True):
            found[i] = likelihood.logprob
    return found


def _encoded(lm: LoadedModel, question: Question, choice: str) -> tuple[list[int], list[int]]:
    """The ids of the question, and those of the choice behind it."""
    between = "" if question.question[-1].isspace() or choice[0].isspace() else " "
    before = lm.tokenizer.encode(question.question.rstrip())
    whole = lm.tokenizer.encode(question.question + between + choice)
    most = lm.config.max_position_embeddings
    if len(whole) > most:
        message = f"{question.location}: question and choice have {len(whole)} tokens, and the model's context {most}"
        raise DataError(message, "a shorter question, or a model with more context")
    cut = common_prefix_length(before, whole)
    if cut == 0:
        raise DataError(f"{question.location}: nothing of the question comes before a choice", "a longer question")
    return whole[:cut], whole[cut:]


def _question(row: dict[str, Any], line: int, location: str) -> Question:
    question, choices, right = (row.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(question, str) or not question:
        raise DataError(f"{location}: 'question' is not a text", _EXAMPLE)
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f"{location}: 'choices' is not a list of two texts or more", _EXAMPLE)
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(choices):
        raise DataError(f"{location}: 'answer' is not an index from 0 to {len(choices) - 1}", _EXAMPLE)
    return Question(line, question, choices, right, location)
