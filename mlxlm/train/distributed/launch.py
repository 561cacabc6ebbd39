"""Starting a command on several hosts, or several times on this one, with `mlx.launch`.

`mlx.launch` alone returns no exit codes, keeps a core busy and ends all processes at once. This protects from:

- a rank that fails without notice: each process reports its process id and exit code to the launcher;
- a Ctrl-C that loses the last steps: the processes have a session of their own, and the launcher signals rank 0 only,
  which saves and ends the others;
- a killed launcher that leaves processes behind: it locks the hostfile, and rank 0 ends when the lock is free;
- a rank that never ends after another one has: it is killed after some time;
- runs on the same machine that meet each other: each takes its own free ports;
- processes of one machine that compete for cores and memory: each takes an equal share.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any

from mlxlm.backend import device, platform
from mlxlm.train.distributed.hostfile import LOCALHOST
from mlxlm.utils.errors import PlatformError

# Seconds in which all processes must end after one has: if it wasn't rank 0, rank 0 saves, on a disk that may be slow.
_SECONDS_AFTER_RANK_0, _SECONDS_AFTER_OTHERS = 30.0, 600.0
_REPORT_MARK = "\x1e"  # ASCII's record separator: no other line of stdout begins with it
# MLX's messages about connections and exits; the launcher reports those itself.
_MLX_MESSAGES = (b"[ring]", b"closed by the peer", b"Too many send/recv", b"[WARN] Node with rank")
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


class LaunchedProcesses:
    """The processes of one `mlx.launch`.

    Args:
        hostfile: The content of a hostfile, see `make_hostfile`.
        module: The Python module to run on each host, with the launcher's arguments (see `RankProcess`) before `args`.
        args: Arguments.

    Attributes:
        exit_codes: By rank, for those that have ended in order.

    Raises:
        PlatformError: There is no mlx.launch.
    """

    def __init__(self, hostfile: dict[str, Any], module: str, args: list[str]):
        self.num_processes = len(hostfile["hosts"])
        self.exit_codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._last_exit: float | None = None
        self._num_signals = 0
        self._process: subprocess.Popen | None = None
        self._hostfile, self._module, self._args = hostfile, module, args
        self._secret = secrets.token_hex(8)
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        self._program = shutil.which("mlx.launch", path=path)
        if self._program is None:
            raise PlatformError("mlx.launch, which comes with MLX, was not found", "pip install --upgrade mlx")

    def run(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Run to the end; the output of all processes goes to `stdout` and `stderr`."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(self._hostfile, file)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            with subprocess.Popen(self._command(file.name), **pipes, start_new_session=True) as self._process:
                outputs = (self._process.stdout, stdout), (self._process.stderr, stderr)
                readers = [threading.Thread(target=self.forward, args=pair, daemon=True) for pair in outputs]
                for reader in readers:
                    reader.start()
                while self._process.poll() is None:
                    time.sleep(0.05)
                    timeout = _SECONDS_AFTER_RANK_0 if 0 in self.exit_codes else _SECONDS_AFTER_OTHERS
                    if self._last_exit is not None and time.monotonic() - self._last_exit > timeout:
                        self._kill_all(signal.SIGKILL)
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
        if self._num_signals > 2:
            self._kill_all(signal.SIGKILL)
        elif 0 in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[0], signal.SIGINT if signal_number == signal.SIGINT else signal.SIGTERM)
        else:
            self._kill_all(signal.SIGTERM)

    def forward(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Copy output to `target`, except MLX's messages and the reports of the processes."""
        mark = f"{_REPORT_MARK}{self._secret} ".encode()
        for line in source:
            if line.startswith(mark):
                self._read_report(*line[len(mark) :].split())
            elif not any(message in line for message in _MLX_MESSAGES):
                try:
                    target.write(line)
                    target.flush()
                except OSError:  # read on all the same: the processes wait while their pipe is full
                    os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())

    def _command(self, hostfile: str) -> list[str]:
        local = sum(host["ssh"] == LOCALHOST for host in self._hostfile["hosts"])
        sharing = local if local == self.num_processes else 1  # processes that share this machine
        threads = max(1, platform.cpu_cores() // sharing)  # a BLAS counts the cores before `use_share` limits them
        env = [f"{name}={threads}" for name in _THREAD_VARIABLES if sharing > 1 and name not in os.environ]
        command = [self._program, "--hostfile", hostfile, "--starting-port", str(_free_ports(self.num_processes))]
        command += [option for variable in env for option in ("--env", variable)]
        return [*command, "--", sys.executable, "-m", self._module, self._secret, hostfile, str(sharing), *self._args]

    def _read_report(self, rank: bytes, name: bytes, number: bytes) -> None:
        if name == b"pid":
            self._pids[int(rank)] = int(number)
            if len(self._pids) == self.num_processes:  # makes mlx.launch notice that nobody reads: see `RankProcess`
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
        else:
            self.exit_codes[int(rank)] = int(number)
            self._last_exit = time.monotonic()

    def _kill_all(self, signal_number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal_number)


class RankProcess:
    """In a process that `LaunchedProcesses` has started: its share of the machine, and reports to the launcher.

    Args:
        secret: Marks the reports.
        hostfile: Path of the hostfile, which the launcher has locked.
        sharing: Number of processes that share this machine.
    """

    def __init__(self, secret: str, hostfile: str, sharing: int):
        self.rank = int(os.environ.get("MLX_RANK", "0"))
        self._mark = f"{_REPORT_MARK}{secret}"
        use_share(self.rank, sharing)
        if self.rank == 0:
            threading.Thread(target=_end_with_launcher, args=[hostfile], daemon=True).start()
        # mlx.launch polls without a pause whether it can write to stdin, which takes a core, until that fails.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def report(self, stdout: IO[str], name: str, number: int) -> None:
        """Write a report for the launcher: "pid" or "exit"."""
        stdout.write(f"{self._mark} {self.rank} {name} {number}\n")
        stdout.flush()


def use_share(rank: int, sharing: int) -> None:
    """Limit this process to its share of the machine's memory and, on Linux, of the cores."""
    device.split_memory_between(max(1, sharing))
    if sharing > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = cores[rank * len(cores) // sharing : (rank + 1) * len(cores) // sharing]
        os.sched_setaffinity(0, share or [cores[rank % len(cores)]])


def _end_with_launcher(hostfile: str) -> None:
    """Wait until the launcher has ended, then end as after SIGTERM: rank 0 saves and ends the others.

    After an ordinary run the launcher ends later than this process.
    """
    with open(hostfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    with suppress(OSError):
        os.unlink(hostfile)
    devnull = os.open(os.devnull, os.O_WRONLY)  # nobody reads the output
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.kill(os.getpid(), signal.SIGTERM)


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free here."""
    for _ in range(100):
        first = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError, OverflowError):
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
            return first
    raise PlatformError("there are no free ports for the processes of the run")
