"""The report of all checks: a JSON file, and a page for people with one row for checks of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxlm.doctor.check import BENCHMARKS, KERNELS, Result
from mlxlm.report.html import render_html
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.formatting import human_bytes, human_count, human_flops, human_seconds
from mlxlm.utils.json_files import write_json
from mlxlm.utils.resources import resource

_UNITS = {
    "bytes_per_second": lambda x: f"{human_bytes(x)}/s",
    "gflops": lambda x: human_flops(1e9 * x),
    "prompt_tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
    "tokens_per_second": lambda x: f"{x:,.4g} tokens/s",
    "share_of_bandwidth": lambda x: f"{x:.0%}",
    "parameters": human_count,
}


def summarize(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """A row for the results of all checks of one name: section, name, outcome, seconds, and what was measured."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.section, result.name), []).append(result)
    return [
        (*names, _outcome(group), f"{sum(result.seconds for result in group):.1f} s", _phrase(group))
        for names, group in groups.items()
    ]


def display(name: str, value: Any) -> str:
    """Show a value of a result or a fact with its unit, which follows from its name."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _UNITS:
        return _UNITS[name](value)
    if name.endswith("_bytes") or name == "bytes_per_token":
        return human_bytes(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _outcome(group: Sequence[Result]) -> str:
    failed, skipped = (sum(result.status == status for result in group) for status in ("failed", "skipped"))
    if failed:
        return "failed" if len(group) == 1 else f"{failed} of {len(group)} failed"
    if skipped:
        return "skipped" if skipped == len(group) else f"{skipped} of {len(group)} skipped"
    return "passed" if len(group) == 1 else f"{len(group)} passed"


def _phrase(group: Sequence[Result]) -> str:
    reasons = [result.reason for result in group if result.reason]
    if reasons and len(group) == 1:
        return reasons[0]
    if errors := [r.values["error"] for r in group if r.values.get("error") is not None]:
        tolerance = max(result.values["tolerance"] for result in group if "tolerance" in result.values)
        return f"relative error at most {max(errors):.2g}, allowed {tolerance:g}"
    phrases = []
    if speedups := sorted(r.values["metal_speedup"] for r in group if "metal_speedup" in r.values):
        ends = dict.fromkeys(f"{speedup:.2g}" for speedup in (speedups[0], speedups[-1]))
        phrases.append(f"Metal kernels {' to '.join(ends)} times as fast as MLX's operations")
    if choices := [r.values["in_use"] == r.values["fastest"] for r in group if "fastest" in r.values]:
        phrases.append(f"the implementation in use is the fastest in {sum(choices)} of {len(choices)}")
    if len(group) == 1 and not phrases:
        return ", ".join(_shown(group[0].values))
    return "; ".join([*phrases, *dict.fromkeys(reasons)])


def _shown(values: Mapping[str, Any]) -> Iterable[str]:
    """The values that matter most, as phrases."""
    phrases = {
        "right": f"{{}} of {values.get('questions')} answers",
        "bytes_per_second": "{}",
        "gflops": "{}",
        "microseconds_per_launch": "{} µs each in a chain",
        "microseconds_of_one": "{} µs alone",
        "prompt_tokens_per_second": "prompt {}",
        "tokens_per_second": "{}",
        "share_of_bandwidth": "{} of memory bandwidth",
        "last_loss": "loss {}",
        "stopped_after_step": "stopped after step {}",
        "steps": "{} steps",
        "metal": "Metal kernels in {} cases",
        "mlx": "MLX's operations in {}",
        "blockwise": "blockwise operations in {}",
    }
    return (phrase.format(display(name, values[name])) for name, phrase in phrases.items() if name in values)


_MAX_ROWS = 12  # of a table that is not folded


@dataclass(frozen=True)
class Report:
    """Facts about a machine, and the results of checks.

    Attributes:
        facts: See `report_facts`.
        results: In their order.
        date: When, in UTC.
        seconds: How long all of them took.
    """

    facts: dict[str, Any]
    results: Sequence[Result]
    date: str
    seconds: float

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return [result for result in self.results if result.status == "failed"]

    @property
    def headline(self) -> str:
        """How many checks passed."""
        counts = {s: sum(r.status == s for r in self.results) for s in ("passed", "failed", "skipped")}
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{numbers} in {human_seconds(self.seconds)}"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        checks = [asdict(result) for result in self.results]
        return {"date": self.date, "seconds": round(self.seconds, 1), "facts": self.facts, "checks": checks}

    def write(self, folder: Path) -> None:
        """Write both files into a new folder.

        Raises:
            CheckpointError: The folder exists, or can't be written.
        """
        with atomic_new_folder(folder) as partial:
            write_json(partial / "doctor.json", self.to_dict())
            (partial / "doctor.html").write_text(self.to_html(), encoding="utf-8")

    def to_html(self) -> str:
        """The page."""
        facts = [(_label(name), display(name, value)) for name, value in self.facts.items() if name != "packages"]
        return render_html(
            Path(__file__).with_name("page.html"),
            title=f"mlxlm doctor: {self.facts['chip']}, {self.facts['device'].partition(' ')[0]}",
            headline=f"{self.headline}, {self.date} UTC",
            failed=self.failed,
            summary=summarize(self.results),
            facts=facts,
            packages=list(self.facts["packages"].items()),
            kernels=_kernel_rows(self.results),
            sections=[_section(name, self.results) for name in dict.fromkeys(r.section for r in self.results)],
        )


def _kernel_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """For each Metal kernel: the number of checks that launched it, how many failed, and the largest error.

    There are no rows if none was launched.
    """
    checks: dict[str, list[Result]] = {path.stem: [] for path in sorted(resource("metal_kernels").glob("*.metal"))}
    for result in results:
        if result.section == KERNELS:
            for name in result.values.get("kernels", ()):
                checks.setdefault(name, []).append(result)
    rows: list[tuple[str, ...]] = []
    for name, launched in checks.items():
        errors = [result.values["error"] for result in launched if result.values["error"] is not None]
        failed = sum(result.status == "failed" for result in launched)
        largest = f"{max(errors):.1e}" if errors else "–"
        rows.append((name, str(len(launched)), str(failed) if launched else "–", largest))
    return rows if any(checks.values()) else []


def _section(section: str, results: Iterable[Result]) -> dict[str, Any]:
    """The table of a section, with a column for each value that is a number or a text."""
    rows = [result for result in results if result.section == section]
    hidden = {"why", "details", "kernels", "operations", "tolerance"}
    columns = dict.fromkeys(name for row in rows for name in row.values if name not in hidden)
    table = [
        (
            row.title,
            f"{row.status}: {row.reason}" if row.reason else row.status,
            *(display(name, row.values[name]) if name in row.values else "" for name in columns),
            f"{row.seconds:.2f}",
        )
        for row in rows
    ]
    in_use = [tuple(o.values()) for row in rows for o in row.values.get("operations", ())]
    return {
        "name": section,
        "header": ["check", "result", *map(_label, columns), "seconds"],
        "rows": table,
        "folded": section in (KERNELS, BENCHMARKS) and len(table) > _MAX_ROWS,
        "in_use": in_use,
    }
