"""Summarizes results for people: one row for checks of the same name, and values with units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.doctor.check import Result
from mlxlm.utils.formatting import human_bytes, human_count, human_flops

_UNITS = {
    "bytes_per_second": lambda x: f"{human_bytes(x)}/s",
    "gflops": lambda x: human_flops(1e9 * x),
    "prompt_tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
    "tokens_per_second": lambda x: f"{x:,.4g} tokens/s",
    "share_of_bandwidth": lambda x: f"{x:.0%}",
    "parameters": human_count,
}


@dataclass(frozen=True)
class Summary:
    """The results of all checks of one name.

    Attributes:
        section: Part of the report.
        name: Name of the checks.
        outcome: Such as "passed" or "2 of 48 failed".
        values: What was measured, in one phrase.
        seconds: Of all of them.
    """

    section: str
    name: str
    outcome: str
    values: str
    seconds: float


def summarize(results: Iterable[Result]) -> list[Summary]:
    """Summarize results, in their order."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.section, result.name), []).append(result)
    return [
        Summary(section, name, _outcome(group), _phrase(group), sum(result.seconds for result in group))
        for (section, name), group in groups.items()
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


def label(name: str) -> str:
    """The heading of a value."""
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
