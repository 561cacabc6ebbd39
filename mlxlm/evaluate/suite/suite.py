"""The evaluation suite: what a model knows of grammar, what it can do with its context, how well it is calibrated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.checkpoint.locations import SUITE_FILE, checkpoint_step, list_checkpoints
from mlxlm.data import Document
from mlxlm.evaluate.loglikelihood import Loglikelihood, LoglikelihoodScorer, start_token_id
from mlxlm.evaluate.multiple_choice import score_choices
from mlxlm.evaluate.suite.estimates import Estimate, bootstrap, wilson
from mlxlm.evaluate.suite.minimal_pairs import minimal_pairs, phenomena
from mlxlm.evaluate.suite.predictions import built_in_text, predict
from mlxlm.evaluate.suite.tasks import TASKS, Task, random_words
from mlxlm.generation import load
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import read_json, write_json

ALL = "all"  # the condition of a score over all conditions
ACCURACY, LOSS_REDUCTION, CALIBRATION_ERROR = "accuracy", "loss reduction", "calibration error"
_REPEATED_WORDS = (8, 16, 32)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SuiteSize:
    """How much to evaluate.

    Attributes:
        pairs: Minimal pairs of each phenomenon. Multiples of 48 have each template and number equally often.
        items: Of each condition of a task.
        windows: Of text.
    """

    pairs: int
    items: int
    windows: int


FULL, FAST = SuiteSize(192, 64, 64), SuiteSize(48, 16, 16)


@dataclass(frozen=True)
class Score:
    """One figure of the suite.

    Attributes:
        group: "grammar", "tasks" or "text".
        name: Such as "passive" or "copy".
        condition: Such as "6 words", or "all".
        metric: What the estimate is, such as "accuracy".
        estimate: The value with its 95 % confidence interval.
        count: Number of items: pairs, questions, texts or windows.
        chance: The value of random guesses, if there is one.
        exact_match: The share of items whose answer greedy decoding produces, of tasks with an answer.
    """

    group: str
    name: str
    condition: str
    metric: str
    estimate: Estimate
    count: int
    chance: float | None = None
    exact_match: Estimate | None = None


@dataclass(frozen=True)
class ReliabilityBin:
    """Predictions of similar confidence: their number, mean confidence and accuracy."""

    count: int
    confidence: float
    accuracy: Estimate


@dataclass(frozen=True)
class SuiteResult:
    """The scores of a model.

    Attributes:
        scores: In the order of the suite.
        reliability: Next-token predictions by confidence, without empty bins.
        left_out: Tasks with their conditions that don't fit the model's context.
    """

    scores: list[Score]
    reliability: list[ReliabilityBin]
    left_out: list[str]


def evaluate_suite(
    lm: LoadedModel,
    size: SuiteSize = FULL,
    *,
    documents: Iterable[Document] | None = None,
    seed: int = 0,
    progress: Progress = lambda _phase, _done, _total: None,
) -> SuiteResult:
    """Evaluate a model on the suite. The items are the same for all models.

    Args:
        lm: The model.
        size: `FULL` or `FAST`, whose items are the first ones of `FULL`.
        documents: A text for calibration and loss by position. None: Python's language reference.
        seed: Chooses the items.
        progress: Called with a phase, the number of its items done and of all of them.

    Raises:
        ConfigError: The tokenizer has neither a BOS nor an EOS token.
        DataError: The text is too short.
        CheckpointError: The model's logits are NaN.
    """
    text = built_in_text() if documents is None else documents
    predictions = predict(lm, text, size.windows, lambda *done: progress("Calibration", *done))  # first: it may fail
    scorer = LoglikelihoodScorer(lm)
    left_out: list[str] = []
    scores = _grammar_scores(lm, scorer, size.pairs, seed, progress)
    for task in TASKS:
        scores += _task_scores(lm, scorer, task, size.items, seed, progress, left_out)
    scores += _induction_scores(lm, scorer, size.items, seed, progress, left_out)
    windows = len(predictions.losses)
    for metric, estimate in (
        (CALIBRATION_ERROR, predictions.calibration_error()),
        ("accuracy", predictions.accuracy()),
        ("confidence", predictions.confidence()),
    ):
        scores.append(Score("text", "next token", ALL, metric, estimate, windows))
    for positions, loss in predictions.loss_by_position().items():
        scores.append(Score("text", "next token", f"{positions} before", "loss", loss, windows))
    reliability = []
    for sums in predictions.bins().swapaxes(0, 1):
        if count := int(sums[:, 0].sum()):
            accuracy = bootstrap(sums, lambda total: total[..., 2] / total[..., 0])
            reliability.append(ReliabilityBin(count, float(sums[:, 1].sum() / count), accuracy))
    return SuiteResult(scores, reliability, left_out)


def evaluate_checkpoints(
    run: Path,
    size: SuiteSize,
    *,
    documents: Callable[[], Iterable[Document] | None],
    texts: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = lambda _phase, _done, _total: None,
) -> dict[int, SuiteResult]:
    """Evaluate each checkpoint that a run has kept, and record the scores in its `suite.json` for the report.

    Scores of earlier checkpoints stay in the file, unless they were measured with other settings.

    Args:
        run: The folder.
        size: See `evaluate_suite`.
        documents: Opens the text, once per checkpoint.
        texts: Where the text is from, to be recorded; none for the built-in text.
        seed: See `evaluate_suite`.
        progress: See `evaluate_suite`; the phases also name the step.

    Returns:
        The results by step.

    Raises:
        CheckpointError: The run has no checkpoint, or the file can't be written.
    """
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise CheckpointError(f"{run} is a run that has no checkpoint yet", "mlxlm pretrain --resume")
    results = {}
    for checkpoint in checkpoints:
        step = checkpoint_step(checkpoint)
        lm = load(checkpoint)
        results[step] = evaluate_suite(
            lm,
            size,
            documents=documents(),
            seed=seed,
            progress=lambda phase, *done, step=step: progress(f"Step {step}: {phase}", *done),
        )
        _record(run / SUITE_FILE, {"seed": seed, **asdict(size), "texts": list(texts)}, step, results[step])
    return results


def _record(path: Path, settings: dict[str, Any], step: int, result: SuiteResult) -> None:
    recorded = read_json(path) if path.exists() else {}
    same = isinstance(recorded, dict) and recorded.get("settings") == settings
    checkpoints = recorded["checkpoints"] if same else {}
    write_json(path, {"settings": settings, "checkpoints": {**checkpoints, str(step): asdict(result)["scores"]}})


def is_right(scores: list[Loglikelihood]) -> bool:
    """Whether the first answer is more likely than each of the others; a tie is wrong."""
    return all(scores[0].logprob > other.logprob for other in scores[1:])


def _grammar_scores(
    lm: LoadedModel, scorer: LoglikelihoodScorer, num_pairs: int, seed: int, progress: Progress
) -> list[Score]:
    """Compare the log-likelihoods of whole sentences."""
    scores, total = [], 0
    for i, phenomenon in enumerate(phenomena()):
        sentences = [sentence for pair in minimal_pairs(phenomenon, num_pairs, seed) for sentence in pair]
        found = _score_texts(lm, scorer, sentences)
        right = sum(is_right(found[j : j + 2]) for j in range(0, len(found), 2))
        scores.append(Score("grammar", phenomenon, "", ACCURACY, wilson(right, num_pairs), num_pairs, 0.5))
        total += right
        progress("Grammar", i + 1, len(phenomena()))
    pairs = num_pairs * len(phenomena())
    return [*scores, Score("grammar", "grammar", ALL, ACCURACY, wilson(total, pairs), pairs, 0.5)]


def _score_texts(lm: LoadedModel, scorer: LoglikelihoodScorer, texts: list[str]) -> list[Loglikelihood]:
    """Score whole texts. They are computed in the order of their lengths, so that rows need little padding."""
    prompt = lm.tokenizer.prefix_token_ids or [start_token_id(lm)]
    rows = [lm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found = dict(zip(order, scorer.score(prompt, [rows[i] for i in order]), strict=True))
    return [found[i] for i in range(len(rows))]


def _task_scores(
    lm: LoadedModel,
    scorer: LoglikelihoodScorer,
    task: Task,
    num_items: int,
    seed: int,
    progress: Progress,
    left_out: list[str],
) -> list[Score]:
    counts: dict[str, list[int]] = {}  # right, exact match, items
    for i, condition in enumerate(task.conditions):
        name = f"{condition} {task.unit}" if condition > 1 else f"1 {task.unit.removesuffix('s')}"
        items = task.items(condition, num_items, seed)
        if not _fits(lm, [item.prompt + max(item.answers, key=len) for item in items]):
            left_out.append(f"{task.name}, {name}")
            continue
        right = exact = 0
        for j, (prompt, answers) in enumerate(items):
            found = score_choices(lm, scorer, prompt, answers)
            right, exact = right + is_right(found), exact + found[0].is_greedy
            progress(task.name.capitalize(), i * num_items + j + 1, len(task.conditions) * num_items)
        counts[name] = [right, exact, num_items]
    if counts:
        counts[ALL] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return [
        Score("tasks", task.name, name, ACCURACY, wilson(right, n), n, task.chance, wilson(exact, n))
        for name, (right, exact, n) in counts.items()
    ]


def _fits(lm: LoadedModel, texts: Iterable[str]) -> bool:
    return all(len(lm.tokenizer.encode(text)) < lm.config.max_position_embeddings for text in texts)


def _induction_scores(
    lm: LoadedModel, scorer: LoglikelihoodScorer, num_items: int, seed: int, progress: Progress, left_out: list[str]
) -> list[Score]:
    """Compare the loss of random words that the text repeats with their loss after other words.

    Induction heads (Olsson et al. 2022) predict what followed the last time. The baseline has other words in front, so
    that it doesn't matter that a loss falls with the position anyway.
    """
    losses: dict[str, np.ndarray] = {}  # nats after other words and when repeated, and bytes, [items, 3]
    for i, length in enumerate(_REPEATED_WORDS):
        rng = random.Random(f"{seed} induction {length}")
        drawn = [random_words(rng, 2 * length) for _ in range(num_items)]
        halves = [(" ".join(chosen[:length]), " ".join(chosen[length:])) for chosen in drawn]
        texts = [text for words, others in halves for text in (others, f"{others} {words}", words, f"{words} {words}")]
        name = f"{length} words"
        if _fits(lm, texts):
            found = np.array([score.logprob for score in _score_texts(lm, scorer, texts)]).reshape(-1, 2, 2)
            sizes = [len(words) + 1 for words, _ in halves]  # with the space
            losses[name] = np.column_stack([found[..., 0] - found[..., 1], sizes])
        else:
            left_out.append(f"induction, {name}")
        progress("Induction", i + 1, len(_REPEATED_WORDS))
    if losses:
        losses[ALL] = np.concatenate(list(losses.values()))
    metrics: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "bits per byte": lambda sums: sums[..., 0] / sums[..., 2] / math.log(2),
        "bits per byte, repeated": lambda sums: sums[..., 1] / sums[..., 2] / math.log(2),
        LOSS_REDUCTION: lambda sums: 1 - sums[..., 1] / sums[..., 0],
    }
    return [
        Score("tasks", "induction", name, metric, bootstrap(rows, statistic), len(rows), chance)
        for name, rows in losses.items()
        for (metric, statistic), chance in zip(metrics.items(), (None, None, 0.0), strict=True)
    ]
