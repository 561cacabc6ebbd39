"""Runs checks in a process of its own, so that one that crashes or hangs doesn't stop the others.

A driver can end the process: MLX, for example, throws an error of Metal on a thread of its own. The process that runs
the checks prints a JSON line when it begins a check, and another with the result. If it ends in between, that check
has failed, and a new process runs the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

from mlxlm.backend.mlx import ON_CPU
from mlxlm.doctor.check import Check, Result, run_check, without_personal_data
from mlxlm.doctor.decoding_checks import DecodingChecks, memory_checks
from mlxlm.doctor.kernel_checks import benchmark_checks, kernel_checks
from mlxlm.doctor.sizes import CPU, GPU, Sizes
from mlxlm.doctor.training_checks import TrainingChecks
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import MlxlmError

MAX_SECONDS = 300.0  # per check
_MAX_STDERR = 4000  # characters of what a process that crashed has printed last
_COMMAND = python_command("-m", "mlxlm.doctor.worker")


def run_in_processes(
    command: Sequence[str] = _COMMAND, max_seconds: float = MAX_SECONDS
) -> Iterator[tuple[Result | None, int]]:
    """Run all checks. Yields None before the first result, and then each result, with the number of all checks.

    Args:
        command: Starts a process that calls `serve`; the number of checks to leave out is added.
        max_seconds: A check that takes longer is ended, and has failed.

    Raises:
        MlxlmError: The checks can't be listed.
    """
    done, total = 0, None
    with tempfile.TemporaryDirectory(prefix="mlxlm-doctor-") as folder:
        while total is None or done < total:
            before, current = done, None
            with _Process([*command, folder, str(done)], max_seconds) as process:
                for message in process.messages():
                    current = message.get("started")
                    if "checks" in message:
                        total = message["checks"]
                        if done == 0:
                            yield None, total
                    elif "result" in message:
                        done += 1
                        yield Result(**message["result"]), total or 0
            if total is None:
                raise MlxlmError(f"the checks can't be listed: {process.ending()}")
            if current is not None:  # it ended in the middle of a check
                done += 1
                reason, text = process.ending(), without_personal_data(process.stderr)
                yield Result(**current, status="failed", reason=reason, traceback=text), total
            elif before == done < total:
                raise MlxlmError(f"the checks can't be run: {process.ending()}")


class _Process:
    """A process that runs checks. `stderr` is what it has printed last, when it has ended."""

    def __init__(self, command: Sequence[str], max_seconds: float):
        self.stderr = ""
        self._max_seconds, self._timed_out = max_seconds, False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, env=python_environment(), **streams)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        with self._log as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_STDERR))
            self.stderr = log.read().decode(errors="replace")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the process prints, until it ends."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while True:
                timer = Timer(self._max_seconds, self._stop)
                timer.daemon = True
                timer.start()
                line = lines.readline()
                timer.cancel()
                if not line.endswith(b"\n"):
                    break
                yield json.loads(line)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def ending(self) -> str:
        """Say how it has ended."""
        if self._timed_out:
            return f"it took longer than {self._max_seconds:g} seconds"
        last = self.stderr.strip().splitlines()[-1:]
        code = self._process.returncode
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return without_personal_data(f"the process ended {how}{f': {last[0][:200]}' if last else ''}")

    def _stop(self) -> None:
        self._timed_out = True
        self._process.kill()


def serve(checks: Sequence[Check], first: int) -> None:
    """Run the checks from number `first` on, and print the messages that `run_in_processes` reads."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is not a message

    def send(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    send(checks=len(checks))
    for check in checks[first:]:
        send(started={"section": check.section, "name": check.name, "case": check.case})
        send(result=asdict(run_check(check)))


def full_suite(folder: Path, sizes: Sizes | None = None) -> list[Check]:
    """Return the checks. Runs are written to `folder`; by default the sizes are those for this device."""
    sizes = sizes or (CPU if ON_CPU else GPU)
    return [
        *memory_checks(sizes),
        *DecodingChecks(sizes),
        *TrainingChecks(sizes, folder),
        *kernel_checks(sizes),
        *benchmark_checks(sizes),
    ]


if __name__ == "__main__":
    folder, first = sys.argv[1:]
    serve(full_suite(Path(tempfile.mkdtemp(dir=folder))), int(first))
