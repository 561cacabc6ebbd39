"""The report of all checks: a JSON file, and a page for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.doctor.check import BENCHMARKS, KERNELS, Result
from mlxlm.doctor.summary import display, label, summarize
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.formatting import human_seconds
from mlxlm.utils.resources import resource

JSON_FILE, PAGE_FILE = "doctor.json", "doctor.html"
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
        results = [result.to_dict() for result in self.results]
        return {"date": self.date, "seconds": round(self.seconds, 1), "facts": self.facts, "checks": results}

    def write(self, folder: Path) -> None:
        """Write both files into a new folder.

        Raises:
            CheckpointError: The folder exists, or can't be written.
        """
        with atomic_new_folder(folder) as partial:
            text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
            (partial / JSON_FILE).write_text(text + "\n", encoding="utf-8")
            (partial / PAGE_FILE).write_text(self.to_html(), encoding="utf-8")

    def to_html(self) -> str:
        """The page."""
        from mlxlm.report.html import render_html

        facts = [(label(name), display(name, value)) for name, value in self.facts.items() if name != "packages"]
        return render_html(
            Path(__file__).with_name("page.html"),
            title=f"mlxlm doctor: {self.facts['chip']}, {self.facts['device'].partition(' ')[0]}",
            headline=f"{self.headline}, {self.date} UTC",
            failed=self.failed,
            summary=[(s.section, s.name, s.outcome, f"{s.seconds:.1f} s", s.values) for s in summarize(self.results)],
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
        "header": ["check", "result", *map(label, columns), "seconds"],
        "rows": table,
        "folded": section in (KERNELS, BENCHMARKS) and len(table) > _MAX_ROWS,
        "in_use": in_use,
    }
