"""A run's folder as a report needs it. Everything in it may have been written by anybody: what is no number is left
out, what is no text is not shown."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.families import config_to_hf, load_config
from mlxlm.report.log_entries import number, read_log_entries
from mlxlm.report.smoothing import ExponentialMovingAverage, smoothing_span
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError
from mlxlm.utils.json_files import read_json

METRICS = ("tokens", "seconds", "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory")
_RUN_FILE, _LOG, _MANIFEST = "train.json", "log.jsonl", "manifest.json"
_ENDS = ("stopped", "failed", "finished")
_TOLD = ("started", "checkpoint_not_saved", "paused", "throttled", "resumed", "training_warning", *_ENDS)


@dataclass
class RunHistory:
    """What is known of a run. `steps` has a column for each of `METRICS`, and "step" and "smoothed"; a figure that an
    entry lacks is NaN. `validations` are (step, loss, bits per byte), `samples` (step, text). `steps_changed`: how many
    steps the run was to have, after each change of that."""

    name: str
    path: Path
    settings: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    steps: dict[str, array] = field(default_factory=dict)
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    steps_changed: list[float] = field(default_factory=list)
    saved: int = 0

    @property
    def best(self) -> tuple[int, float, float] | None:
        """The validation with the lowest loss."""
        return min(self.validations, key=lambda v: v[1], default=None)

    @property
    def parameters(self) -> float:
        return next((number(e.get("parameters")) for e in reversed(self.events) if e["event"] == "started"), math.nan)

    @property
    def state(self) -> str:
        """How the run stands, by the last entry that says so: a warning may come after the end."""
        known = (e["event"] for e in reversed(self.events) if e["event"] in ("started", *_ENDS))
        last = next(known, "started")
        return "not finished" if last == "started" else last

    def last(self, metric: str) -> float:
        column = self.steps[metric]
        return column[-1] if column else math.nan

    def x_at_step(self, axis: str, step: int) -> float:
        """Where step `step` is on an axis: 0 before the first one; between two steps that were logged, that of the one
        before."""
        logged = bisect_right(self.steps["step"], step)
        return self.steps[axis][logged - 1] if logged else 0.0 if step == 0 else math.nan


def read_run(path: Path) -> RunHistory:
    """The facts of the run at `path`. Raises CheckpointError or ConfigError, naming the file, for what is no run."""
    if not (path / _RUN_FILE).is_file():
        raise CheckpointError(f"{path} is not a run: it has no {_RUN_FILE}", "the --out folder of mlxlm pretrain")
    about = read_json(path / _RUN_FILE)
    if not isinstance(about, Mapping):
        raise ConfigError(f"{path / _RUN_FILE} is not a JSON object")
    settings = about.get("settings")
    history = RunHistory(
        name=path.absolute().name,
        path=path,
        settings=dict(settings) if isinstance(settings, Mapping) else {},
        model=config_to_hf(load_config(path)),
        data=_data(path / about["data"]) if isinstance(about.get("data"), str) else {},
    )
    _read_log(history, path / _LOG)
    return history


def _data(folder: Path) -> dict[str, Any]:
    """Sizes out of the data's manifest; {} where the data is gone."""
    try:
        manifest = read_json(folder / _MANIFEST)
    except MlxlmError:
        return {}
    if not isinstance(manifest, Mapping):
        return {}
    found: dict[str, Any] = {"data": str(folder)}
    for split in ("train", "validation"):
        sizes = manifest.get(split)
        if isinstance(sizes, Mapping):
            found |= {f"{split} {name}": sizes[name] for name in ("tokens", "bytes", "documents") if name in sizes}
    return found


def _read_log(history: RunHistory, path: Path) -> None:
    columns = {name: array("d") for name in ("step", "smoothed", *METRICS)}
    smooth, steps = None, number(history.settings.get("steps"))
    planned = 0 if math.isnan(steps) else int(steps)
    for entry in read_log_entries(path):
        kind, step = entry["event"], entry.get("step", 0)
        if kind == "step" and not math.isnan(loss := number(entry.get("loss"))):
            smooth = smooth or ExponentialMovingAverage(smoothing_span(planned))
            columns["step"].append(step)
            columns["smoothed"].append(smooth(loss))
            for name in METRICS:
                columns[name].append(number(entry.get(name)))
        elif kind == "validation" and not math.isnan(loss := number(entry.get("loss"))):
            history.validations.append((step, loss, number(entry.get("bits_per_byte"))))
        elif kind == "sample":
            history.samples.append((step, f"{entry.get('prompt', '')}{entry.get('text', '')}"))
        elif kind == "steps_changed":
            history.steps_changed.append(number(entry.get("steps")))
        elif kind == "checkpoint_saved":
            history.saved += 1
        elif kind in _TOLD:
            history.events.append(entry)
    history.steps = columns
