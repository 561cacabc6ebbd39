"""Trains in several processes: `--hosts` and `--num-processes` run this command on each host with `mlx.launch`.

`mlx.launch` returns no exit code and, at Ctrl-C, no output. So rank 0, which is a process of this machine, leaves its
process id and its exit code in files, and signals go to it alone: it saves, and ends the others.

As a module this is what `mlx.launch` starts on each host.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.cli.stop_signals import on_stop_signal
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import ConfigError, PlatformError

_LOCALHOST = "127.0.0.1"  # the host that mlx.launch starts without ssh
_PID, _EXIT_CODE = "pid", "exit"  # files of rank 0
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def launch_processes(hosts: str | int, args: list[str]) -> int:
    """Run `mlxlm ARGS` in several processes, and return the exit code of rank 0.

    The first signal lets rank 0 finish its step, the second ends it at once, and the third kills all processes.

    Args:
        hosts: The number of processes on this machine; or names of hosts, see `make_hostfile`; or a hostfile.
        args: The command line.
    """
    sharing = hosts if isinstance(hosts, int) else 1  # processes that share this machine
    with tempfile.TemporaryDirectory(prefix="mlxlm-") as folder:
        hostfile = Path(folder, "hosts.json")
        if isinstance(hosts, str) and Path(hosts).is_file():
            hostfile = Path(hosts)
        else:
            names = [_LOCALHOST] * hosts if isinstance(hosts, int) else hosts.split(",")
            hostfile.write_text(json.dumps(make_hostfile(names)))
        command = [*_mlx_launch(hostfile, sharing), *python_command("-m", __name__, folder, str(sharing), *args)]
        process = subprocess.Popen(command, env=python_environment(), stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        signals: list[int] = []

        def forward(number: int, _frame: object) -> None:
            if number == signal.SIGHUP and signals:  # the end of a terminal is signaled more than once
                return
            signals.append(number)
            with suppress(ProcessLookupError):
                if len(signals) > 2 or not Path(folder, _PID).exists():
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    os.kill(int(Path(folder, _PID).read_text()), number)

        with on_stop_signal(forward):
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                with suppress(OSError):  # mlx.launch keeps a core busy until it can't write to the processes
                    os.write(process.stdin.fileno(), b"\n")
        code = Path(folder, _EXIT_CODE)
        return int(code.read_text()) if code.exists() else 1


def make_hostfile(names: list[str]) -> list[dict[str, Any]]:
    """Return the content of a hostfile: the address of each host, this machine without ssh.

    Raises:
        ConfigError: A name has no address, or the first is not this machine, which leads the run.
    """
    hosts = []
    for name in map(str.strip, names):
        try:
            if not name or name.startswith("-"):  # an empty name has the address 0.0.0.0, and "-o" is an option of ssh
                raise OSError
            address = socket.gethostbyname(name.rpartition("@")[2])
        except (OSError, UnicodeError):
            raise ConfigError(f"{name or 'an empty name'} has no address", "--hosts a,b,c, or a hostfile") from None
        hosts.append({"ssh": _LOCALHOST if _is_this_machine(address) else name, "ips": [address]})
    if hosts[0]["ssh"] != _LOCALHOST:
        raise ConfigError(f"{names[0]} is not this machine, which leads the run", "this machine first")
    return hosts


def _is_this_machine(address: str) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _mlx_launch(hostfile: Path, sharing: int) -> list[str]:
    """The command up to its `--`. Each of `sharing` processes on this machine gets its share of the cores."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    program = shutil.which("mlx.launch", path=path)
    if program is None:
        raise PlatformError("mlx.launch, which comes with MLX, was not found", "pip install --upgrade mlx")
    port = 20_000 + secrets.randbelow(12_000)  # not the default, which another run may have
    threads = max(1, platform.cpu_cores() // sharing)
    env = [f"{name}={threads}" for name in _THREAD_VARIABLES if sharing > 1 and name not in os.environ]
    backend = [] if hostfile.read_bytes().lstrip().startswith(b"{") else ["--backend", "ring"]  # or in the hostfile
    options = [option for variable in env for option in ("--env", variable)]
    return [program, "--hostfile", str(hostfile), *backend, "--starting-port", str(port), *options, "--"]


def strip_options(args: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return a command line without these options, which take a value each."""
    remaining, rest = [], iter(args)
    for arg in rest:
        if arg in flags:
            next(rest, None)
        elif not arg.startswith(tuple(f"{flag}=" for flag in flags)):
            remaining.append(arg)
    return remaining


@contextmanager
def finish_before_sigterm(num_processes: int) -> Iterator[None]:
    """Let an error of the block be shown: mlx.launch ends all processes once any of them has failed."""
    try:
        yield
    except BaseException:
        if num_processes > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


def _main() -> int:
    from mlxlm.backend import device
    from mlxlm.cli.main import main

    folder, num_local, *args = sys.argv[1:]
    rank, sharing = int(os.environ["MLX_RANK"]), int(num_local)
    if rank == 0:
        Path(folder, _PID).write_text(str(os.getpid()))
    device.split_memory_between(sharing)
    if sharing > 1 and sys.platform == "linux":  # else each divides its batches among all cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[rank::sharing] or [cores[rank % len(cores)]])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that mlx.launch can't write to this process
    code = 1
    try:
        main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if rank == 0:
        Path(folder, _EXIT_CODE).write_text(str(code))
    return 0 if code > 128 else code  # if one fails, mlx.launch ends the others, but a stopped run ends by itself


if __name__ == "__main__":
    sys.exit(_main())
