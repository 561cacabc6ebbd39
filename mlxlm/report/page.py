"""The report as one HTML file that needs nothing else: no network, no script to be read.

Every text that comes out of a run is escaped, and the page's policy forbids whatever it does not bring along.
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

REPORT_MARKER = "<!-- a report of mlxlm -->"  # by which a report knows another one, which it may replace
_SAMPLES, _SAMPLE_LENGTH, _EVENTS = 40, 4000, 200  # that are shown of a run
_WIDE = (1160, 330)
_POINTS = 1200  # of a curve, shared among the runs of a page


def page(runs: Sequence[RunHistory], defaults: Callable[[int], Mapping[str, Any]]) -> str:
    """The whole page about one run, or about several side by side. `defaults`: see `write_report`."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    own = Path(__file__).parent
    style, script = (own.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    body = [
        f"<h1>{_text(title)}</h1>",
        _legend(runs) if len(runs) > 1 else f'<p class="soft">{_text(_summary(runs[0]))}</p>',
        "<h2>Results</h2>", _results(runs),
        "<h2>Curves</h2>", _axis_choice(), *_charts(runs),
        *(["<h2>What differs</h2>", _differences(runs)] if len(runs) > 1 else []),
        *(part for run in runs for part in _about(run, _changed(run, defaults), len(runs) > 1)),
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
    """Escaped; characters that HTML has no place for are shown as such."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value)))


def _table(rows: Iterable[Sequence[Any]], header: Sequence[str] = (), changed: Iterable[Any] = ()) -> str:
    known = set(changed)
    head = f"<thead><tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    lines = (
        f"<tr{_CHANGED if row[0] in known else ''}>{''.join(f'<td>{_text(_short(cell))}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


_CHANGED = ' class="changed"'


def _short(value: Any) -> Any:
    """Seven digits say enough: 0.006049133196100126 is 0.006049133."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _shown(value: float, unit: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else unit(value)


def _summary(run: RunHistory) -> str:
    best = f", best {run.best[2]:.4f} bits per byte" if run.best and not math.isnan(run.best[2]) else ""
    return f"{_shown(run.parameters, human_count)} parameters, {run.state} at step {_last_step(run)}{best}"


def _last_step(run: RunHistory) -> int:
    return int(run.steps["step"][-1]) if run.steps["step"] else 0


def _legend(runs: Sequence[RunHistory]) -> str:
    keys = (
        f'<span><svg viewBox="0 0 16 7"><polyline class="c{i % NUM_COLORS}{_SECOND if i >= NUM_COLORS else ""}" '
        f'points="0,4 16,4"/></svg> {_text(run.name)}</span>'
        for i, run in enumerate(runs)
    )
    return f'<div class="legend">{"".join(keys)}</div>'


_SECOND = " second"


def _results(runs: Sequence[RunHistory]) -> str:
    header = (
        "run", "state", "parameters", "steps", "tokens", "best bits per byte", "best loss", "at step", "time in steps",
        "tokens/s", "most memory",
    )  # fmt: skip
    rows = []
    for run in runs:
        speeds = sorted(v for v in run.steps["tokens_per_second"] if v > 0)
        memory = [v for v in run.steps["memory"] if not math.isnan(v)]
        at, loss, bits = run.best or ("–", math.nan, math.nan)
        rows.append((
            run.name, run.state, _shown(run.parameters, human_count), _last_step(run),
            _shown(run.last("tokens"), human_count), _shown(bits, "{:.4f}".format), _shown(loss, "{:.4f}".format), at,
            _shown(run.last("seconds"), human_seconds),
            f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "–", human_bytes(max(memory)) if memory else "–",
        ))  # fmt: skip
    return _table(rows, header)


def _axis_choice() -> str:
    return (
        "<fieldset>Against "
        '<label><input type="radio" name="axis" id="by-tokens" checked> tokens</label> '
        '<label><input type="radio" name="axis" id="by-seconds"> time</label></fieldset>'
    )


def _charts(runs: Sequence[RunHistory]) -> list[str]:
    for_loss = _curves(runs, "loss (nats per token)", "", _loss, wide=True)
    others = [
        _curves(runs, "validation (bits per byte)", "", _bits),
        _curves(runs, "learning rate", "", lambda r, i, x: [_curve(r, i, x, "learning_rate")], from_zero=True),
        _curves(runs, "gradient norm", "", lambda r, i, x: [_curve(r, i, x, "grad_norm")]),
        _curves(runs, "tokens per second", "", lambda r, i, x: [_curve(r, i, x, "tokens_per_second")], from_zero=True),
        _curves(runs, "memory", "bytes", lambda r, i, x: [_curve(r, i, x, "memory")], from_zero=True),
    ]
    return ['<div class="charts">', for_loss, *others, "</div>"]


def _curve(run: RunHistory, i: int, axis: str, column: str, style: str = "line", name: str = "") -> Series:
    points = zip(run.steps[axis], run.steps[column], strict=True)
    if column == "tokens_per_second":  # 0: not known yet
        points = (p for p in points if p[1] > 0)
    return Series(f"{run.name}{name}", list(points), i, style)


def _loss(run: RunHistory, i: int, axis: str) -> list[Series]:
    validation = [(run.x_at_step(axis, step), loss) for step, loss, _ in run.validations]
    return [
        _curve(run, i, axis, "loss", "faint", " each step"),
        _curve(run, i, axis, "smoothed", "line", " smoothed"),
        Series(f"{run.name} validation", validation, i, "dots", "validation"),
    ]


def _bits(run: RunHistory, i: int, axis: str) -> list[Series]:
    return [Series(run.name, [(run.x_at_step(axis, step), bits) for step, _, bits in run.validations], i, "dots")]


def _curves(
    runs: Sequence[RunHistory],
    title: str,
    unit: str,
    series: Callable[[RunHistory, int, str], list[Series]],
    *,
    wide: bool = False,
    from_zero: bool = False,
) -> str:
    """A chart against tokens and one against time, of which the page shows one."""
    drawn = ""
    for axis in ("tokens", "seconds"):
        curves = [s for i, run in enumerate(runs) for s in series(run, i, axis)]
        if len(runs) > 3:  # a cloud of noise hides what is compared
            curves = [s for s in curves if s.style != "faint"]
        if values := single_values(curves, axis, unit):
            drawn += f'<div class="by-{axis}"><p>{_text("; ".join(values))} (one value, so there is no curve)</p></div>'
            continue
        points = max(100, _POINTS // len(runs))
        marks = _marks(runs[0], axis) if len(runs) == 1 and wide else ()
        both = (("broad", _WIDE, points), ("narrow", (400, 280), points // 2))
        for kind, size, most in both if wide else (("", (400, 240), points // 2),):
            picture = chart(curves, axis, unit, size=size, points=most, from_zero=from_zero, marks=marks)
            drawn += picture and f'<div class="by-{axis} {kind}">{picture}</div>'
    key = f'<p class="soft">{_LOSS_KEY}</p>' if wide and "<svg" in drawn else ""
    caption = f"<figcaption>{_text(title)}</figcaption>"
    return drawn and f"<figure{_WIDE_CLASS if wide else ''}>{caption}{key}{drawn}</figure>"


_WIDE_CLASS = ' class="wide"'
_LOSS_KEY = "faint: each step; solid: smoothed; dots: validation; ▲: values above the picture, up to the one beside it"


def _marks(run: RunHistory, axis: str) -> list[tuple[float, str]]:
    """Where the run was interrupted."""
    kinds = {"paused", "throttled", "stopped", "failed", "checkpoint_not_saved"}
    found = [(e.get("step", 0), _told(e)) for e in run.events if e["event"] in kinds or _resumed(e)]
    return [(run.x_at_step(axis, step), f"step {step}: {text}") for step, text in found[-_EVENTS:]]


def _resumed(event: Mapping[str, Any]) -> bool:
    return event["event"] == "started" and event.get("step", 0) > 0


def _differences(runs: Sequence[RunHistory]) -> str:
    """Settings, model and data, where they are not all the same."""
    facts = [{**run.model, **_shown_settings(run), **run.data} for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    rows = [(name, *(of_run.get(name, "–") for of_run in facts)) for name in names]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return _table(rows, ("", *(run.name for run in runs))) if rows else "<p>Nothing but what chance did.</p>"


def _changed(run: RunHistory, defaults: Callable[[int], Mapping[str, Any]]) -> list[str]:
    """The settings that are not the default."""
    steps = run.settings.get("steps")
    usual = defaults(steps) if isinstance(steps, int) and 0 < steps < 2**53 else {}
    return [name for name, value in usual.items() if run.settings.get(name, value) != value]


def _shown_settings(run: RunHistory) -> dict[str, Any]:
    """All but the plan of a run that repeats another one, which has an entry for each change."""
    repeat_plan = run.settings.get("repeat_plan")
    return {**run.settings, "repeat_plan": "that of another run" if repeat_plan else None}


def _about(run: RunHistory, changed: Sequence[str], several: bool) -> list[str]:
    heading = f'<h2>{_text(run.name)}</h2><p class="soft">{_text(_summary(run))}</p>' if several else ""
    facts = [
        ("Settings", _table(_shown_settings(run).items(), changed=changed)),
        ("Model", _table(run.model.items())),
        ("Data", _table(run.data.items())),
    ]
    tables = "".join(f"<section><h3>{name}</h3>{table}</section>" for name, table in facts)
    return [
        heading,
        *([f"<h{3 if several else 2}>Samples</h{3 if several else 2}>", *_samples(run)] if run.samples else []),
        f"<h{3 if several else 2}>What happened</h{3 if several else 2}>", _events(run),
        f"<h{3 if several else 2}>Settings, model and data</h{3 if several else 2}>",
        '<p class="soft">Settings in bold are not the default.</p>', f'<div class="facts">{tables}</div>',
    ]  # fmt: skip


def _samples(run: RunHistory) -> list[str]:
    """The latest first; of many, some from all of the run."""
    count = len(run.samples)
    chosen = run.samples
    if count > _SAMPLES:
        chosen = [run.samples[i * (count - 1) // (_SAMPLES - 1)] for i in range(_SAMPLES)]
    parts = [
        f"<details{' open' if i == 0 else ''}><summary>step {step}</summary><pre>{_text(_cut(text))}</pre></details>"
        for i, (step, text) in enumerate(reversed(chosen))
    ]
    left_out = [f'<p class="soft">{_SAMPLES} of {count} samples.</p>'] if count > _SAMPLES else []
    return parts + left_out


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE_LENGTH else text[:_SAMPLE_LENGTH] + " …"


def _events(run: RunHistory) -> str:
    shown = run.events[-_EVENTS:]
    rows = [(e.get("step", "–"), str(e.get("time", "–")).replace("T", " ")[:19], _told(e)) for e in shown]
    earlier = len(run.events) - len(shown)
    notes = [f"{run.saved} checkpoints were saved"]
    if run.steps_changed:
        count, steps = len(run.steps_changed), _shown(run.steps_changed[-1], "{:,.0f}".format)
        times = f"{count} times, at last" if count > 1 else "once,"
        notes.append(f"to end in time, the number of steps was changed {times} to {steps}")
    if earlier:
        notes.append(f"{earlier} earlier events are left out")
    told = f'<div class="told">{_table(rows, ("step", "time (UTC)", ""))}</div>'
    return f'{told}<p class="soft">{"; ".join(notes)}.</p>'


def _told(event: Mapping[str, Any]) -> str:
    kind = event["event"]
    what = {
        "started": "resumed" if _resumed(event) else "started",
        "checkpoint_not_saved": "not saved",
        "resumed": "went on",
    }
    extra = [str(event[name])[:500] for name in ("reason", "message") if event.get(name)]
    seconds = number(event.get("seconds"))
    if kind == "resumed" and not math.isnan(seconds):
        extra.append(f"after {format_value(seconds, 'seconds')}")
    return ": ".join([what.get(kind, kind), ", ".join(extra)]) if extra else what.get(kind, kind)
