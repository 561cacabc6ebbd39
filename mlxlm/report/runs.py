"""Reads the folder of a run for a report. The files are untrusted: values of a wrong type are left out."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mlxlm.checkpoint.locations import RUN_FILE, SUITE_FILE
from mlxlm.data.manifest import MANIFEST_FILE
from mlxlm.families import config_to_hf, load_config
from mlxlm.report.curves import ExponentialMovingAverage, smoothing_span
from mlxlm.report.log_entries import LOG_FILE, number, read_log_entries
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError
from mlxlm.utils.json_files import read_json, read_json_object

METRICS = ("tokens", "seconds", "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory")
_OTHER_FIELDS = ("event", "step", "steps", "seconds_left", "time", "perplexity", "bits_per_byte", "best", "expert_load")
_MAX_LOSS_METRICS = 20
_MAX_SUITE = 64 << 20  # bytes; a checkpoint has 20 kB
_END_EVENTS = ("stopped", "failed", "finished")
_SHOWN_EVENTS = ("started", "checkpoint_not_saved", "paused", "throttled", "resumed", "training_warning", *_END_EVENTS)


class LoggedValidation(NamedTuple):
    """A validation in the log. Missing values are NaN.

    Attributes:
        step: The step after which it ran.
        loss: Nats per token.
        bits_per_byte: The same, per byte of text.
        expert_load: Tokens of the busiest expert relative to the mean, of a mixture of experts.
    """

    step: int
    loss: float
    bits_per_byte: float
    expert_load: float


class SuitePoint(NamedTuple):
    """A score of the checkpoint of a step in the evaluation suite, and its 95 % confidence interval."""

    step: int
    value: float
    low: float
    high: float


@dataclass
class RunHistory:
    """The log, settings, model and data of a run.

    Attributes:
        name: Of the folder.
        path: The folder.
        settings: Training settings, from `train.json`.
        model: The model's configuration.
        data: Sizes of the splits.
        steps: A column for each of `METRICS`, "step" and "smoothed" (the smoothed loss); missing values are NaN.
        validations: In the order of the log.
        samples: (step, text).
        events: Log entries to show: starts, ends, pauses, warnings.
        num_saved: Checkpoints saved.
        loss_metrics: Metrics of the loss by name, such as "rewards/margins": (step, value) of steps.
        validation_metrics: The same of validations.
        suite: Scores in the evaluation suite by name, such as "copy (accuracy)", in the order of the steps.
    """

    name: str
    path: Path
    settings: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    steps: dict[str, array[float]] = field(default_factory=dict)
    validations: list[LoggedValidation] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    num_saved: int = 0
    loss_metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    validation_metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    suite: dict[str, list[SuitePoint]] = field(default_factory=dict)

    @property
    def best(self) -> LoggedValidation | None:
        """The validation with the lowest loss."""
        return min(self.validations, key=lambda v: v.loss, default=None)

    @property
    def has_rewards(self) -> bool:
        """Whether it is a run with a reward function."""
        return "reward" in self.loss_metrics

    @property
    def loss_title(self) -> str:
        """The loss with its unit, as the label of an axis; or the reward, since the loss of GRPO is no measure."""
        name = self.settings.get("loss", "cross_entropy")
        if self.has_rewards:
            return "mean reward"
        return "loss (nats per token)" if name == "cross_entropy" else f"{name} loss"

    @property
    def loss_points(self) -> list[tuple[int, float]]:
        """What `loss_title` names, as (step, value) of each step."""
        losses = zip(map(int, self.steps["step"]), self.steps["loss"], strict=True)
        return self.loss_metrics["reward"] if self.has_rewards else list(losses)

    @property
    def parameters(self) -> float:
        """Number of parameters, or NaN."""
        return next((number(e.get("parameters")) for e in reversed(self.events) if e["event"] == "started"), math.nan)

    @property
    def state(self) -> str:
        """How the run ended: "stopped", "failed", "finished" or "not finished"."""
        states = (e["event"] for e in reversed(self.events) if e["event"] in ("started", *_END_EVENTS))
        last = next(states, "started")  # a warning can follow the end
        return "not finished" if last == "started" else last

    def last(self, metric: str) -> float:
        """The last value of a metric, or NaN."""
        column = self.steps[metric]
        return column[-1] if column else math.nan

    def x_at_step(self, axis: str, step: int) -> float:
        """The value of `axis` ("tokens" or "seconds") at a step: that of the last logged step up to it; 0 at step 0."""
        logged = bisect_right(self.steps["step"], step)
        return self.steps[axis][logged - 1] if logged else 0.0 if step == 0 else math.nan


def read_run(path: Path) -> RunHistory:
    """Read the run at `path`. Raises CheckpointError or ConfigError, which name the file, if it is not a run."""
    if not (path / RUN_FILE).is_file():
        raise CheckpointError(f"{path} is not a run: it has no {RUN_FILE}", "the --out folder of mlxlm pretrain")
    fields = read_json(path / RUN_FILE)
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{path / RUN_FILE} is not a JSON object")
    settings = fields.get("settings")
    history = RunHistory(
        name=path.absolute().name,
        path=path,
        settings=dict(settings) if isinstance(settings, Mapping) else {},
        model=config_to_hf(load_config(path)),
        data=_read_data_sizes(path / fields["data"]) if isinstance(fields.get("data"), str) else {},
    )
    _read_log(history, path / LOG_FILE)
    _read_suite(history, path / SUITE_FILE)
    return history


def _read_suite(history: RunHistory, path: Path) -> None:
    """Read the scores over all conditions that `mlxlm evaluate RUN --suite` has written, if any."""
    checkpoints = read_json_object(path, _MAX_SUITE, ConfigError).get("checkpoints") if path.exists() else None
    if not isinstance(checkpoints, Mapping):
        return
    steps = sorted((int(step), scores) for step, scores in checkpoints.items() if step.isdecimal() and len(step) < 16)
    for step, scores in steps:
        for score in filter(lambda score: isinstance(score, Mapping), scores if isinstance(scores, list) else []):
            estimate = score.get("estimate")
            if score.get("condition") == "all" and isinstance(estimate, Mapping):
                point = SuitePoint(step, *(number(estimate.get(name)) for name in ("value", "low", "high")))
                history.suite.setdefault(f"{score.get('name')} ({score.get('metric')})", []).append(point)


def _read_data_sizes(folder: Path) -> dict[str, Any]:
    """Sizes from the data's manifest; {} if it can't be read."""
    try:
        manifest = read_json(folder / MANIFEST_FILE)
    except MlxlmError:
        return {}
    if not isinstance(manifest, Mapping):
        return {}
    fields: dict[str, Any] = {"data": str(folder)}
    for split in ("train", "validation"):
        sizes = manifest.get(split)
        if isinstance(sizes, Mapping):
            fields |= {f"{split} {name}": sizes[name] for name in ("tokens", "bytes", "documents") if name in sizes}
    return fields


def _read_log(history: RunHistory, path: Path) -> None:
    columns = {name: array("d") for name in ("step", "smoothed", *METRICS)}
    steps = number(history.settings.get("steps"))
    smooth = ExponentialMovingAverage(smoothing_span(0 if math.isnan(steps) else int(steps)))
    for entry in read_log_entries(path):
        kind, step = entry["event"], entry.get("step", 0)
        if kind == "step" and not math.isnan(loss := number(entry.get("loss"))):
            columns["step"].append(step)
            columns["smoothed"].append(smooth(loss))
            for name in METRICS:
                columns[name].append(number(entry.get(name)))
            _add_metrics(history.loss_metrics, entry)
        elif kind == "validation" and not math.isnan(loss := number(entry.get("loss"))):
            bits_per_byte, load = number(entry.get("bits_per_byte")), number(entry.get("expert_load"))
            history.validations.append(LoggedValidation(step, loss, bits_per_byte, load))
            _add_metrics(history.validation_metrics, entry)
        elif kind == "sample":
            history.samples.append((step, f"{entry.get('prompt', '')}{entry.get('text', '')}"))
        elif kind == "checkpoint_saved":
            history.num_saved += 1
        elif kind in _SHOWN_EVENTS:
            history.events.append(entry)
    history.steps = columns


def _add_metrics(metrics: dict[str, list[tuple[int, float]]], entry: Mapping[str, Any]) -> None:
    """Add the other numbers of a log entry, which are metrics of the loss."""
    for name in entry.keys() - {*METRICS, *_OTHER_FIELDS}:
        if not math.isnan(value := number(entry[name])) and (name in metrics or len(metrics) < _MAX_LOSS_METRICS):
            metrics.setdefault(name, []).append((entry["step"], value))
