"""Renders the report: one self-contained HTML file that can be read without network and without scripts.

Every text from a run is escaped, and the page's content security policy forbids everything but its own style and
script.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mlxlm.report.chart import NUM_COLORS, Series, chart, format_value, single_values
from mlxlm.report.log_entries import number
from mlxlm.report.runs import RunHistory
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

REPORT_MARKER = "<!-- a report of mlxlm -->"  # a new report may replace a file with this marker
_MAX_SAMPLES, _MAX_SAMPLE_CHARS, _MAX_EVENTS = 40, 4000, 200  # shown per run
_CHART_SIZE, _NARROW_SIZE, _WIDE_SIZE = (400, 240), (400, 280), (1160, 330)
_MAX_POINTS = 1200  # of a curve, divided by the number of runs
_MISSING = "–"
_LOSS_KEY = "faint: each step; solid: smoothed; dots: validation; ▲: highest value above the chart"


def render_page(runs: Sequence[RunHistory], defaults: Callable[[int], Mapping[str, Any]]) -> str:
    """Render the page of one run, or of several side by side. `defaults`: see `write_report`."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    here = Path(__file__).parent
    style, script = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    body = [
        f"<h1>{_text(title)}</h1>",
        _legend(runs) if len(runs) > 1 else f'<p class="soft">{_text(_summary(runs[0]))}</p>',
        "<h2>Results</h2>", _results(runs),
        "<h2>Curves</h2>", _axis_choice(), *_charts(runs),
        *(["<h2>Differences</h2>", _differences(runs)] if len(runs) > 1 else []),
        *(part for run in runs for part in _run_details(run, _non_default(run, defaults), len(runs) > 1)),
    ]  # fmt: skip
    return (
        f'<!doctype html>\n{REPORT_MARKER}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + f'\n<div id="readout"></div><script>{script}</script></body></html>\n'
    )


def _text(value: Any) -> str:
    """Escape a value; unprintable characters become U+FFFD."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value)))


def _table(rows: Iterable[Sequence[Any]], header: Sequence[str] = (), bold: Iterable[Any] = ()) -> str:
    """Render a table; rows whose first cell is in `bold` are bold."""
    bold = set(bold)
    head = f"<thead><tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    body = []
    for row in rows:
        cells = "".join(f"<td>{_text(_rounded(cell))}</td>" for cell in row)
        body.append(f'<tr class="changed">{cells}</tr>' if row[0] in bold else f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _rounded(value: Any) -> Any:
    """Round floats to seven digits: 0.006049133196100126 becomes 0.006049133."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _formatted(value: float, unit: Callable[[float], str]) -> str:
    return _MISSING if math.isnan(value) else unit(value)


def _summary(run: RunHistory) -> str:
    best = f", best {run.best[2]:.4f} bits per byte" if run.best and not math.isnan(run.best[2]) else ""
    return f"{_formatted(run.parameters, human_count)} parameters, {run.state} at step {_last_step(run)}{best}"


def _last_step(run: RunHistory) -> int:
    return int(run.steps["step"][-1]) if run.steps["step"] else 0


def _legend(runs: Sequence[RunHistory]) -> str:
    keys = []
    for i, run in enumerate(runs):
        classes = f"c{i % NUM_COLORS}{' second' if i >= NUM_COLORS else ''}"
        line = f'<svg viewBox="0 0 16 7"><polyline class="{classes}" points="0,4 16,4"/></svg>'
        keys.append(f"<span>{line} {_text(run.name)}</span>")
    return f'<div class="legend">{"".join(keys)}</div>'


def _results(runs: Sequence[RunHistory]) -> str:
    header = (
        "run", "state", "parameters", "steps", "tokens", "best bits per byte", "best loss", "at step", "time in steps",
        "tokens/s", "peak memory",
    )  # fmt: skip
    rows = []
    for run in runs:
        speeds = sorted(v for v in run.steps["tokens_per_second"] if v > 0)
        memory = [v for v in run.steps["memory"] if not math.isnan(v)]
        at, loss, bits = run.best or (_MISSING, math.nan, math.nan)
        rows.append((
            run.name, run.state, _formatted(run.parameters, human_count), _last_step(run),
            _formatted(run.last("tokens"), human_count), _formatted(bits, "{:.4f}".format),
            _formatted(loss, "{:.4f}".format), at,
            _formatted(run.last("seconds"), human_seconds),
            f"{speeds[len(speeds) // 2]:,.0f}" if speeds else _MISSING,
            human_bytes(max(memory)) if memory else _MISSING,
        ))  # fmt: skip
    return _table(rows, header)


def _axis_choice() -> str:
    return (
        "<fieldset>Against "
        '<label><input type="radio" name="axis" id="by-tokens" checked> tokens</label> '
        '<label><input type="radio" name="axis" id="by-seconds"> time</label></fieldset>'
    )


def _charts(runs: Sequence[RunHistory]) -> list[str]:
    def metric(name: str) -> Callable[[RunHistory, int, str], list[Series]]:
        return lambda run, i, axis: [_metric_curve(run, i, axis, name)]

    return [
        '<div class="charts">',
        _figure(runs, "loss (nats per token)", _loss_curves, wide=True),
        _figure(runs, "validation (bits per byte)", _validation_curves),
        _figure(runs, "learning rate", metric("learning_rate"), from_zero=True),
        _figure(runs, "gradient norm", metric("grad_norm")),
        _figure(runs, "tokens per second", metric("tokens_per_second"), from_zero=True),
        _figure(runs, "memory", metric("memory"), "bytes", from_zero=True),
        "</div>",
    ]


def _metric_curve(run: RunHistory, i: int, axis: str, column: str, style: str = "line", name: str = "") -> Series:
    points = list(zip(run.steps[axis], run.steps[column], strict=True))
    if column == "tokens_per_second":  # 0: not measured yet
        points = [p for p in points if p[1] > 0]
    return Series(f"{run.name}{name}", points, i, style)


def _loss_curves(run: RunHistory, i: int, axis: str) -> list[Series]:
    validation = [(run.x_at_step(axis, step), loss) for step, loss, _ in run.validations]
    return [
        _metric_curve(run, i, axis, "loss", "faint", " each step"),
        _metric_curve(run, i, axis, "smoothed", "line", " smoothed"),
        Series(f"{run.name} validation", validation, i, "dots", "validation"),
    ]


def _validation_curves(run: RunHistory, i: int, axis: str) -> list[Series]:
    return [Series(run.name, [(run.x_at_step(axis, step), bits) for step, _, bits in run.validations], i, "dots")]


def _figure(
    runs: Sequence[RunHistory],
    title: str,
    curves: Callable[[RunHistory, int, str], list[Series]],
    unit: str = "",
    *,
    wide: bool = False,
    from_zero: bool = False,
) -> str:
    """A chart over tokens and one over time, of which the page shows one. Wide charts also have a narrow version."""
    content = ""
    for axis in ("tokens", "seconds"):
        series = [s for i, run in enumerate(runs) for s in curves(run, i, axis)]
        if len(runs) > 3:  # noise would hide the differences
            series = [s for s in series if s.style != "faint"]
        if values := single_values(series, axis, unit):
            content += f'<div class="by-{axis}"><p>{_text("; ".join(values))} (a single value)</p></div>'
            continue
        points = max(100, _MAX_POINTS // len(runs))
        marks = _marks(runs[0], axis) if len(runs) == 1 and wide else ()
        versions = [("broad", _WIDE_SIZE, points), ("narrow", _NARROW_SIZE, points // 2)]
        for kind, size, max_points in versions if wide else [("", _CHART_SIZE, points // 2)]:
            svg = chart(series, axis, unit, size=size, max_points=max_points, from_zero=from_zero, marks=marks)
            content += svg and f'<div class="by-{axis} {kind}">{svg}</div>'
    if not content:
        return ""
    key = f'<p class="soft">{_LOSS_KEY}</p>' if wide and "<svg" in content else ""
    opening = '<figure class="wide">' if wide else "<figure>"
    return f"{opening}<figcaption>{_text(title)}</figcaption>{key}{content}</figure>"


def _marks(run: RunHistory, axis: str) -> list[tuple[float, str]]:
    """Where the run was interrupted: (x, label)."""
    kinds = {"paused", "throttled", "stopped", "failed", "checkpoint_not_saved"}
    events = [(e.get("step", 0), _describe(e)) for e in run.events if e["event"] in kinds or _is_resumption(e)]
    return [(run.x_at_step(axis, step), f"step {step}: {text}") for step, text in events[-_MAX_EVENTS:]]


def _is_resumption(event: Mapping[str, Any]) -> bool:
    return event["event"] == "started" and event.get("step", 0) > 0


def _differences(runs: Sequence[RunHistory]) -> str:
    """Settings, model and data that are not the same for all runs."""
    fields = [{**run.model, **_displayed_settings(run), **run.data} for run in runs]
    names = dict.fromkeys(name for run_fields in fields for name in run_fields)
    rows = [(name, *(run_fields.get(name, _MISSING) for run_fields in fields)) for name in names]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return _table(rows, ("", *(run.name for run in runs))) if rows else "<p>None: same settings, model and data.</p>"


def _non_default(run: RunHistory, defaults: Callable[[int], Mapping[str, Any]]) -> list[str]:
    """The settings that are not the default."""
    steps = run.settings.get("steps")
    values = defaults(steps) if isinstance(steps, int) and 0 < steps < 2**53 else {}
    return [name for name, value in values.items() if run.settings.get(name, value) != value]


def _displayed_settings(run: RunHistory) -> dict[str, Any]:
    """The settings without the long plan of a repeated run."""
    repeat_plan = run.settings.get("repeat_plan")
    return {**run.settings, "repeat_plan": "of another run" if repeat_plan else None}


def _run_details(run: RunHistory, non_default: Sequence[str], several: bool) -> list[str]:
    """Samples, events, settings, model and data of a run; one level lower if the page has several runs."""
    tag = "h3" if several else "h2"
    heading = f'<h2>{_text(run.name)}</h2><p class="soft">{_text(_summary(run))}</p>' if several else ""
    tables = [
        ("Settings", _table(_displayed_settings(run).items(), bold=non_default)),
        ("Model", _table(run.model.items())),
        ("Data", _table(run.data.items())),
    ]
    sections = "".join(f"<section><h3>{name}</h3>{table}</section>" for name, table in tables)
    return [
        heading,
        *([f"<{tag}>Samples</{tag}>", *_samples(run)] if run.samples else []),
        f"<{tag}>Events</{tag}>",
        _events(run),
        f"<{tag}>Settings, model and data</{tag}>",
        '<p class="soft">Settings in bold differ from the default.</p>',
        f'<div class="facts">{sections}</div>',
    ]


def _samples(run: RunHistory) -> list[str]:
    """The latest first; if there are many, evenly spread over the run."""
    count = len(run.samples)
    chosen = run.samples
    if count > _MAX_SAMPLES:
        chosen = [run.samples[i * (count - 1) // (_MAX_SAMPLES - 1)] for i in range(_MAX_SAMPLES)]
    parts = [
        f"<details{' open' if i == 0 else ''}><summary>step {step}</summary>"
        f"<pre>{_text(_truncated(text))}</pre></details>"
        for i, (step, text) in enumerate(reversed(chosen))
    ]
    note = [f'<p class="soft">{_MAX_SAMPLES} of {count} samples.</p>'] if count > _MAX_SAMPLES else []
    return parts + note


def _truncated(text: str) -> str:
    return text if len(text) <= _MAX_SAMPLE_CHARS else text[:_MAX_SAMPLE_CHARS] + " …"


def _events(run: RunHistory) -> str:
    shown = run.events[-_MAX_EVENTS:]
    rows = [(e.get("step", _MISSING), str(e.get("time", _MISSING)).replace("T", " ")[:19], _describe(e)) for e in shown]
    earlier = len(run.events) - len(shown)
    notes = [f"{run.num_saved} checkpoints were saved"]
    if run.steps_changed:
        count, steps = len(run.steps_changed), _formatted(run.steps_changed[-1], "{:,.0f}".format)
        times = f"{count} times, most recently" if count > 1 else "once,"
        notes.append(f"to fit the time limit, the number of steps was changed {times} to {steps}")
    if earlier:
        notes.append(f"{earlier} earlier events are not shown")
    table = f'<div class="events">{_table(rows, ("step", "time (UTC)", ""))}</div>'
    return f'{table}<p class="soft">{"; ".join(notes)}.</p>'


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
