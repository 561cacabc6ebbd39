"""Starting a command on several hosts, or several times on this one, with `mlx.launch`.

`mlx.launch` alone returns no exit codes, keeps a core busy and ends all processes at once. This protects from:

- a rank that fails without notice: each process reports its process id and exit code to the launcher;
- a Ctrl-C that loses the last steps: the processes have a session of their own, and the launcher signals rank 0 only,
  which saves and ends the others;
- a killed launcher that leaves processes behind: it locks the hostfile, and rank 0 ends when the lock is free;
- a rank that never ends after another one has: it is killed after some time.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any

from mlxlm.backend import platform
from mlxlm.train.distributed.hostfile import LOCALHOST
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import PlatformError

REPORT_MARK = "\x1emlxlm"  # ASCII's record separator: no other line of stdout begins with it
LAUNCHED_VARIABLE = "MLXLM_LAUNCHED"  # set in the environment of the processes
# Seconds in which all processes must end after one has: if it wasn't rank 0, rank 0 saves, on a disk that may be slow.
_SECONDS_AFTER_RANK_0, _SECONDS_AFTER_OTHERS = 30.0, 600.0
# MLX's messages about connections and exits; the launcher reports those itself.
_MLX_MESSAGES = (b"[ring]", b"closed by the peer", b"Too many send/recv", b"[WARN] Node with rank")
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


class LaunchedProcesses:
    """Starts the processes of one `mlx.launch`.

    Args:
        hostfile: The content of a hostfile, see `make_hostfile`.
        module: The Python module to run on each host, with the path of the hostfile and the number of processes that
            share this machine before `args`. It writes reports to stdout: mark, rank, "pid" or "exit", number.
        args: Arguments.

    Attributes:
        exit_codes: By rank, for those that have reported one.

    Raises:
        PlatformError: There is no mlx.launch.
    """

    def __init__(self, hostfile: dict[str, Any], module: str, args: list[str]):
        self.num_processes = len(hostfile["hosts"])
        self.exit_codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._last_exit: float | None = None
        self._num_signals = 0
        self._hostfile = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115 - locked until `run` returns
        json.dump(hostfile, self._hostfile)
        self._hostfile.flush()
        fcntl.flock(self._hostfile, fcntl.LOCK_EX)
        local = sum(host["ssh"] == LOCALHOST for host in hostfile["hosts"])
        sharing = local if local == self.num_processes else 1
        command = [*_mlx_launch(self._hostfile.name, sharing), "--"]
        command += python_command("-m", module, self._hostfile.name, str(sharing), *args)
        stdin, self._stdin = os.pipe()
        self._process = subprocess.Popen(
            command,
            env=python_environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(stdin)

    def run(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Wait for the end of all processes; their output goes to `stdout` and `stderr`."""
        with self._hostfile, self._process as process:
            outputs = (process.stdout, stdout), (process.stderr, stderr)
            readers = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in outputs]
            for reader in readers:
                reader.start()
            while process.poll() is None:
                time.sleep(0.05)
                timeout = _SECONDS_AFTER_RANK_0 if 0 in self.exit_codes else _SECONDS_AFTER_OTHERS
                if self._last_exit is not None and time.monotonic() - self._last_exit > timeout:
                    self._kill_all()
            for reader in readers:
                reader.join(timeout=5)

    @property
    def exit_code(self) -> int:
        """That of rank 0, or if it is 0, the highest; a process without one counts as 1."""
        codes = [self.exit_codes.get(rank, 1) for rank in range(self.num_processes)]
        return codes[0] or max(codes)

    def stop(self, signal_number: int) -> None:
        """Forward a signal to rank 0. The first finishes its step, the second stops at once, the third kills.

        SIGHUP counts once: the end of a terminal is signaled more than once.
        """
        if signal_number == signal.SIGHUP and self._num_signals:
            return
        self._num_signals += 1
        if self._num_signals > 2 or 0 not in self._pids:
            self._kill_all()
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pids[0], signal.SIGINT if signal_number == signal.SIGINT else signal.SIGTERM)

    def _forward(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Copy output to `target`, except MLX's messages and the reports of the processes."""
        for line in source:
            if line.startswith(REPORT_MARK.encode()):
                self._read_report(*line.split()[1:])
            elif not any(message in line for message in _MLX_MESSAGES):
                with suppress(OSError):  # nobody reads `target`; the processes would wait if their pipe were full
                    target.write(line)
                    target.flush()

    def _read_report(self, rank: bytes, name: bytes, number: bytes) -> None:
        if name == b"pid":
            self._pids[int(rank)] = int(number)
            if len(self._pids) == self.num_processes:  # mlx.launch notices that they don't read their stdin
                os.write(self._stdin, b"\n")
        else:
            self.exit_codes[int(rank)] = int(number)
            self._last_exit = time.monotonic()

    def _kill_all(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _mlx_launch(hostfile: str, sharing: int) -> list[str]:
    """The command up to its `--`. Each of `sharing` processes on this machine gets its share of the cores."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    program = shutil.which("mlx.launch", path=path)
    if program is None:
        raise PlatformError("mlx.launch, which comes with MLX, was not found", "pip install --upgrade mlx")
    port = 20_000 + secrets.randbelow(12_000)  # not the default, which another run may have
    threads = max(1, platform.cpu_cores() // sharing)
    env = [f"{name}={threads}" for name in _THREAD_VARIABLES if sharing > 1 and name not in os.environ]
    options = [option for variable in (f"{LAUNCHED_VARIABLE}=1", *env) for option in ("--env", variable)]
    return [program, "--hostfile", hostfile, "--starting-port", str(port), *options]
