"""The report of all checks: a JSON file, and a summary with one row for checks of the same name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxlm.doctor.check import KERNELS, Result
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_file
from mlxlm.utils.formatting import human_bytes, human_flops, human_seconds
from mlxlm.utils.resources import resource

_UNITS = {
    "bytes_per_second": lambda x: f"{human_bytes(x)}/s",
    "gflops": lambda x: human_flops(1e9 * x),
    "prompt_tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
    "tokens_per_second": lambda x: f"{x:,.4g} tokens/s",
    "share_of_bandwidth": lambda x: f"{x:.0%}",
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
    return (phrase.format(_displayed(name, values[name])) for name, phrase in phrases.items() if name in values)


def _displayed(name: str, value: float) -> str:
    """Show a value with its unit, which follows from its name."""
    return _UNITS[name](value) if name in _UNITS else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


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

    def write(self, path: Path) -> None:
        """Write a JSON file. Raise CheckpointError if it exists, or can't be written."""
        with atomic_new_file(path, CheckpointError, "another `out`") as file:
            file.write(json.dumps(self.to_dict(), indent=2, ensure_ascii=False).encode())


def summarize_metal_kernels(results: Iterable[Result]) -> list[tuple[str, ...]]:
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
