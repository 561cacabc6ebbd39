"""Renders the report: one self-contained HTML file that can be read without network and without scripts.

The template escapes every text from a run, and the page's content security policy forbids everything but its own style
and script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlxlm.report.curves import block_means
from mlxlm.report.html import NUM_COLORS, Series, chart, format_value, render_html, single_values
from mlxlm.report.log_entries import number
from mlxlm.report.runs import RunHistory
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

REPORT_MARKER = "<!-- a report of mlxlm -->"  # a new report may replace a file with this marker
_MAX_SAMPLES, _MAX_SAMPLE_CHARS, _MAX_EVENTS = 40, 4000, 200  # shown per run
_CHART_SIZE, _NARROW_SIZE, _WIDE_SIZE = (400, 240), (400, 280), (1160, 330)
_MAX_POINTS = 1200  # of a curve, divided by the number of runs
_MAX_METRIC_POINTS = 100  # of the noisy metrics of a loss
_MISSING = "–"


def render_page(runs: Sequence[RunHistory], defaults: Callable[[int], Mapping[str, Any]]) -> str:
    """Render the page of one run, or of several side by side. `defaults`: see `write_report`."""
    here = Path(__file__).parent
    return render_html(
        here / "page.html",
        (here / "page.js").read_text(encoding="utf-8"),
        marker=Markup(REPORT_MARKER),
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        several=len(runs) > 1,
        runs=runs,
        num_colors=NUM_COLORS,
        result_header=list(_results(runs[0], runs)),
        results=[tuple(_results(run, runs).values()) for run in runs],
        figures=_figures(runs),
        differences=_differences(runs),
        details=[_details(run, defaults) for run in runs],
    )


def _formatted(value: float, unit: Callable[[float], str]) -> str:
    return _MISSING if math.isnan(value) else unit(value)


def _summary(run: RunHistory) -> str:
    bits = run.best.bits_per_byte if run.best else math.nan
    best = "" if math.isnan(bits) else f", best {bits:.4f} bits per byte"
    return f"{_formatted(run.parameters, human_count)} parameters, {run.state} at step {_last_step(run)}{best}"


def _last_step(run: RunHistory) -> int:
    return int(run.steps["step"][-1]) if run.steps["step"] else 0


def _results(run: RunHistory, runs: Sequence[RunHistory]) -> dict[str, Any]:
    """The results of one of `runs`."""
    speeds = sorted(v for v in run.steps["tokens_per_second"] if v > 0)
    memory = [v for v in run.steps["memory"] if not math.isnan(v)]
    at, loss, bits, _ = run.best or (_MISSING, math.nan, math.nan, math.nan)
    rewards = {"best mean reward": _formatted(-loss, "{:.4f}".format)}
    losses = {
        "best bits per byte": _formatted(bits, "{:.4f}".format),
        "best loss": _formatted(math.nan if run.has_rewards else loss, "{:.4f}".format),
    }
    return {
        "run": run.name,
        "state": run.state,
        "parameters": _formatted(run.parameters, human_count),
        "steps": _last_step(run),
        "tokens": _formatted(run.last("tokens"), human_count),
        **(rewards if all(other.has_rewards for other in runs) else losses),
        "at step": at,
        "time in steps": _formatted(run.last("seconds"), human_seconds),
        "tokens/s": f"{speeds[len(speeds) // 2]:,.0f}" if speeds else _MISSING,
        "peak memory": human_bytes(max(memory)) if memory else _MISSING,
    }


def _figures(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    def metric(name: str) -> Callable[[RunHistory, int, str], list[Series]]:
        return lambda run, i, axis: [_metric_curve(run, i, axis, name)]

    def validation(field: str) -> Callable[[RunHistory, int, str], list[Series]]:
        return lambda run, i, axis: [_validation_curve(run, i, axis, field)]

    names = sorted({name for run in runs for name in run.loss_metrics} - {"reward"})
    return [
        _figure(runs, " and ".join(dict.fromkeys(run.loss_title for run in runs)), _loss_curves, wide=True),
        *(_figure(runs, name, _loss_metric(name)) for name in names),
        _figure(runs, "validation (bits per byte)", validation("bits_per_byte")),
        _figure(runs, "tokens of the busiest expert, relative to the mean", validation("expert_load")),
        _figure(runs, "learning rate", metric("learning_rate"), from_zero=True),
        _figure(runs, "gradient norm", metric("grad_norm")),
        _figure(runs, "tokens per second", metric("tokens_per_second"), from_zero=True),
        _figure(runs, "memory", metric("memory"), "bytes", from_zero=True),
        *(
            _figure(runs, name, _suite_curves(name))
            for name in dict.fromkeys(name for run in runs for name in run.suite)
        ),
    ]


def _suite_curves(name: str) -> Callable[[RunHistory, int, str], list[Series]]:
    """A score of the evaluation suite, with its confidence interval."""

    def curves(run: RunHistory, i: int, axis: str) -> list[Series]:
        points = [(run.x_at_step(axis, point.step), point) for point in run.suite.get(name, ())]
        ends = [[(x, getattr(point, end)) for x, point in points] for end in ("low", "high")]
        bounds = [Series(f"{run.name} 95%", end, i, "faint") for end in ends]
        return [*bounds, Series(run.name, [(x, point.value) for x, point in points], i, "dots")]

    return curves


def _metric_curve(run: RunHistory, i: int, axis: str, column: str, style: str = "line", name: str = "") -> Series:
    points = list(zip(run.steps[axis], run.steps[column], strict=True))
    if column == "tokens_per_second":  # 0: not measured yet
        points = [p for p in points if p[1] > 0]
    return Series(f"{run.name}{name}", points, i, style)


def _loss_curves(run: RunHistory, i: int, axis: str) -> list[Series]:
    if run.has_rewards:
        return _loss_metric("reward")(run, i, axis)
    return [
        _metric_curve(run, i, axis, "loss", "faint", " each step"),
        _metric_curve(run, i, axis, "smoothed", "line", " smoothed"),
        _validation_curve(run, i, axis, "loss", " validation"),
    ]


def _validation_curve(run: RunHistory, i: int, axis: str, field: str, name: str = "") -> Series:
    points = [(run.x_at_step(axis, v.step), getattr(v, field)) for v in run.validations]
    return Series(f"{run.name}{name}", points, i, "dots", name.strip())


def _loss_metric(metric: str) -> Callable[[RunHistory, int, str], list[Series]]:
    """The curves of a metric of the loss: its mean over neighboring steps, and that of validations."""

    def curves(run: RunHistory, i: int, axis: str) -> list[Series]:
        steps, validations = (
            [(run.x_at_step(axis, step), value) for step, value in metrics.get(metric, [])]
            for metrics in (run.loss_metrics, run.validation_metrics)
        )
        return [
            Series(run.name, block_means(steps, _MAX_METRIC_POINTS), i),
            Series(f"{run.name} validation", validations, i, "dots", "validation"),
        ]

    return curves


def _figure(
    runs: Sequence[RunHistory],
    title: str,
    curves: Callable[[RunHistory, int, str], list[Series]],
    unit: str = "",
    *,
    wide: bool = False,
    from_zero: bool = False,
) -> dict[str, Any]:
    """A chart over tokens and one over time, of which the page shows one. Wide charts also have a narrow version."""
    parts = []
    for axis in ("tokens", "seconds"):
        series = [s for i, run in enumerate(runs) for s in curves(run, i, axis)]
        if len(runs) > 3:  # noise would hide the differences
            series = [s for s in series if s.style != "faint"]
        if values := single_values(series, axis, unit):
            parts.append({"classes": f"by-{axis}", "svg": "", "text": "; ".join(values)})
            continue
        points = max(100, _MAX_POINTS // len(runs))
        marks = _marks(runs[0], axis) if len(runs) == 1 and wide else ()
        versions = [("broad", _WIDE_SIZE, points), ("narrow", _NARROW_SIZE, points // 2)]
        for kind, size, max_points in versions if wide else [("", _CHART_SIZE, points // 2)]:
            if svg := chart(series, axis, unit, size=size, max_points=max_points, from_zero=from_zero, marks=marks):
                parts.append({"classes": f"by-{axis} {kind}", "svg": Markup(svg), "text": ""})
    return {"title": title, "wide": wide, "parts": parts}


def _marks(run: RunHistory, axis: str) -> list[tuple[float, str]]:
    """Where the run was interrupted: (x, label)."""
    kinds = {"paused", "throttled", "stopped", "failed", "checkpoint_not_saved"}
    events = [(e.get("step", 0), _describe(e)) for e in run.events if e["event"] in kinds or _is_resumption(e)]
    return [(run.x_at_step(axis, step), f"step {step}: {text}") for step, text in events[-_MAX_EVENTS:]]


def _is_resumption(event: Mapping[str, Any]) -> bool:
    return event["event"] == "started" and event.get("step", 0) > 0


def _differences(runs: Sequence[RunHistory]) -> list[tuple[Any, ...]]:
    """Settings, model and data that are not the same for all runs."""
    fields = [{**run.model, **run.settings, **run.data} for run in runs]
    names = dict.fromkeys(name for run_fields in fields for name in run_fields)
    rows = [(name, *(run_fields.get(name, _MISSING) for run_fields in fields)) for name in names]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def _details(run: RunHistory, defaults: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """Samples, events, settings, model and data of a run."""
    notes = [f"{run.num_saved} checkpoints were saved"]
    if len(run.events) > _MAX_EVENTS:
        notes.append(f"{len(run.events) - _MAX_EVENTS} earlier events are not shown")
    steps = run.settings.get("steps")
    values = defaults(steps) if isinstance(steps, int) and 0 < steps < 2**53 else {}
    return {
        "name": run.name,
        "summary": _summary(run),
        "samples": _samples(run),
        "num_samples": len(run.samples),
        "events": [
            (e.get("step", _MISSING), str(e.get("time", _MISSING)).replace("T", " ")[:19], _describe(e))
            for e in run.events[-_MAX_EVENTS:]
        ],
        "notes": notes,
        "settings": run.settings.items(),
        "non_default": [name for name, value in values.items() if run.settings.get(name, value) != value],
        "model": run.model.items(),
        "data": run.data.items(),
    }


def _samples(run: RunHistory) -> list[tuple[int, str]]:
    """The latest first; if there are many, evenly spread over the run."""
    count, chosen = len(run.samples), run.samples
    if count > _MAX_SAMPLES:
        chosen = [chosen[i * (count - 1) // (_MAX_SAMPLES - 1)] for i in range(_MAX_SAMPLES)]
    cut = _MAX_SAMPLE_CHARS
    return [(step, text if len(text) <= cut else f"{text[:cut]} …") for step, text in reversed(chosen)]


def _describe(event: Mapping[str, Any]) -> str:
    kind = event["event"]
    names = {
        "started": "resumed" if _is_resumption(event) else "started",
        "checkpoint_not_saved": "not saved",
        "resumed": "continued",
    }
    details = [str(event[name])[:500] for name in ("reason", "message") if event.get(name)]
    seconds = number(event.get("seconds"))
    if kind == "resumed" and not math.isnan(seconds):
        details.append(f"after {format_value(seconds, 'seconds')}")
    name = names.get(kind, kind)
    return f"{name}: {', '.join(details)}" if details else name
