"""Checks that mlxlm works on this machine, and measures how fast it is there, for a report of a problem.

from mlxlm.doctor import check_machine

report = check_machine()
print(report.headline, [result.reason for result in report.failed])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from mlxlm.doctor.check import Check, CheckFailed, CheckSkipped, Result, run_check, without_personal_data
from mlxlm.doctor.facts import basic_facts, report_facts
from mlxlm.doctor.report import Report
from mlxlm.doctor.worker import run_in_processes

__all__ = ["Check", "CheckFailed", "CheckSkipped", "Report", "Result", "basic_facts", "check_machine", "run_check"]


def check_machine(
    progress: Callable[[str, int, int], None] = lambda _section, _done, _total: None,
    results: Iterable[tuple[Result | None, int]] | None = None,
) -> Report:
    """Run all checks, each in another process than this one, and return the report.

    Args:
        progress: Called with the section, the number of finished checks and of all checks.
        results: Where results come from: by default `run_in_processes`.

    Raises:
        MlxlmError: The checks can't be listed.
    """
    start, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    finished: list[Result] = []
    for result, total in run_in_processes() if results is None else results:
        if result is not None:
            finished.append(result)
        progress(result.section if result else "listing the checks", len(finished), total)
    facts = without_personal_data(report_facts())
    return Report(facts, finished, date, time.monotonic() - start)
