"""A check of this machine, and its result, without what identifies a person."""

from __future__ import annotations

import re
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mlxlm.backend.mlx import tree_map
from mlxlm.utils.errors import MlxlmError, one_line
from mlxlm.utils.json_files import without_nonfinite

_HOMES = re.compile(r"/(?:Users|home)/[^/\s\"':]+|/root(?=/)")
_TEMPORARY = re.compile(r"(?:/private)?/var/folders/[^/\s]+/[^/\s]+/T\b")  # macOS: one folder per user


def without_personal_data(value: Any) -> Any:
    """Return a JSON value in which no text has a home folder, a user's temporary folder or the computer's name."""

    def clean(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        for name, replacement in _names():
            text = text.replace(name, replacement)
        return _TEMPORARY.sub("TMPDIR", _HOMES.sub("~", text))

    return tree_map(clean, value)


@cache
def _names() -> list[tuple[str, str]]:
    """Texts of this machine to replace, the longest path first."""
    paths = {str(Path(__file__).parents[1]): "mlxlm"}
    try:
        paths[str(Path.home())] = "~"
        paths[tempfile.gettempdir()] = "TMPDIR"
    except (RuntimeError, OSError):  # no home folder, or no folder to write to
        pass
    ordered = sorted(paths.items(), key=lambda item: -len(item[0]))
    names = [(text, replacement) for text, replacement in ordered if len(text) > 2]
    host = socket.gethostname()
    return [*names, *((name, "HOST") for name in (host, host.partition(".")[0]) if len(name) >= 6)]


KERNELS, BENCHMARKS = "kernels", "kernel benchmarks"  # sections
Status = Literal["passed", "failed", "skipped"]
_MAX_REASON = 300  # characters of an exception; the traceback has all of it


class CheckFailed(Exception):
    """Something is wrong. The values that show it are in the result, too."""

    def __init__(self, reason: str, values: dict[str, Any] | None = None):
        super().__init__(reason)
        self.values = values or {}


class CheckSkipped(Exception):
    """The check has no meaning on this machine."""


@dataclass(frozen=True)
class Check:
    """A check.

    Args:
        section: The part of the report that it belongs to.
        name: What is checked. Checks with the same name are summarized together.
        run: Returns the measured values, as JSON values. Any exception is a failure.
        case: Which of several checks with this name it is.
    """

    section: str
    name: str
    run: Callable[[], dict[str, Any]]
    case: str = ""


@dataclass(frozen=True)
class Result:
    """What a check found. Section, name and case are those of the check.

    Attributes:
        status: "passed", "failed" or "skipped".
        reason: Why it failed or was skipped; "" if it passed.
        values: What was measured, to four significant digits.
        seconds: How long it took.
        traceback: Of an unexpected exception.
    """

    section: str
    name: str
    case: str
    status: Status
    reason: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    traceback: str = ""

    @property
    def title(self) -> str:
        """Name and case."""
        return f"{self.name}: {self.case}" if self.case else self.name


def run_check(check: Check) -> Result:
    """Run a check. An exception is a failure, whatever it is: compilers and drivers raise anything."""
    start = time.perf_counter()
    status: Status = "passed"
    values: dict[str, Any] = {}
    reason = trace = ""
    try:
        values = check.run()
    except CheckSkipped as skipped:
        status, reason = "skipped", str(skipped)
    except CheckFailed as failure:
        status, reason, values = "failed", str(failure), failure.values
    except Exception as error:
        kind = "" if isinstance(error, MlxlmError) else f"{type(error).__name__}: "
        status, reason, trace = "failed", kind + one_line(str(error))[:_MAX_REASON], traceback.format_exc()
    seconds = time.perf_counter() - start
    result = Result(check.section, check.name, check.case, status, reason, values, seconds, trace)

    def rounded(value: Any) -> Any:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return Result(**tree_map(rounded, without_personal_data(without_nonfinite(asdict(result)))))
