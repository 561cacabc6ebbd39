"""The evaluation suite over the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxlm import generation
from mlxlm.checkpoint.locations import SUITE_FILE, checkpoint_step, list_checkpoints
from mlxlm.data import Document
from mlxlm.evaluate.suite.suite import Progress, SuiteResult, SuiteSize, evaluate_suite
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import read_json, write_json


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
        lm = generation.load(checkpoint)
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
