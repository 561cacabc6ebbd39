"""Runs a command in several processes: `--hosts` and `--num-processes` start it on each host with `mlx.launch`.

Rank 0 is this process, which keeps the terminal, its signals and its exit code. `mlx.launch` also starts a process for
rank 0, which hands over its environment, and waits until this one has ended: then `mlx.launch` ends, too.

As a module this is what `mlx.launch` starts on each host.
"""

from __future__ import annotations

import functools
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from mlxlm.backend import platform
from mlxlm.cli.options import option
from mlxlm.utils.child_python import python_command, python_environment, replace_process
from mlxlm.utils.errors import ConfigError, PlatformError

_LOCALHOST = "127.0.0.1"  # the host that mlx.launch starts without ssh
_ENVIRONMENT, _ALIVE = "environment.json", "alive"  # of rank 0; a pipe that this process has open until it ends
_RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_HOSTS = "Split MODEL over these machines, this one first; or an MLX hostfile."


def is_launched() -> bool:
    """Whether this is one of several processes already."""
    return any(name in os.environ for name in _RANK_VARIABLES)


def launch_processes(hosts: str | int, args: list[str]) -> NoReturn:
    """Start `mlxlm ARGS` on the other hosts, and replace this process by rank 0.

    Args:
        hosts: The number of processes on this machine; or names of hosts, see `make_hostfile`; or a hostfile.
        args: The command line.

    Raises:
        ConfigError, PlatformError: The processes can't be started.
    """
    with tempfile.TemporaryDirectory(prefix="mlxlm-") as folder:
        hostfile = Path(folder, "hosts.json")
        if isinstance(hosts, str) and Path(hosts).is_file():
            hostfile, sharing = Path(hosts), 1
        else:
            content = make_hostfile([_LOCALHOST] * hosts if isinstance(hosts, int) else hosts.split(","))
            hostfile.write_text(json.dumps(content))
            sharing = sum(host["ssh"] == _LOCALHOST for host in content)
        os.mkfifo(Path(folder, _ALIVE))
        alive = os.open(Path(folder, _ALIVE), os.O_RDWR)
        ranks = python_command("-m", __name__, folder, str(sharing), *args)
        process = subprocess.Popen(
            [*_mlx_launch(hostfile, sharing), *ranks],
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            start_new_session=True,  # Ctrl-C goes to rank 0 alone
        )
        try:
            while not Path(folder, _ENVIRONMENT).exists():
                if process.poll() is not None:
                    raise PlatformError("mlx.launch has ended, see its message above", "mlx.launch --verbose")
                time.sleep(0.02)
            changes = json.loads(Path(folder, _ENVIRONMENT).read_text())
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.stdin is not None
    for descriptor in (alive, process.stdin.fileno()):
        os.set_inheritable(descriptor, True)
    replace_process("-m", __name__, str(process.stdin.fileno()), str(sharing), *args, changes=changes)


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
    env += ["MLX_METAL_FAST_SYNCH=1"]  # a GPU then waits for sums without the system, as MLX's documentation advises
    backend = [] if hostfile.read_bytes().lstrip().startswith(b"{") else ["--backend", "ring"]  # or in the hostfile
    options = [option for variable in env for option in ("--env", variable)]
    return [program, "--hostfile", str(hostfile), *backend, "--starting-port", str(port), *options, "--"]


def hosts_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--hosts` to a command that generates text: the other processes follow this one, see `load_model`."""

    @functools.wraps(command)
    def with_option(*, hosts: str | None, **values: Any) -> Any:
        if not is_launched():
            if hosts is not None:
                launch_processes(hosts, sys.argv[1:])
            return command(**values)
        from mlxlm.backend.process_group import join_process_group
        from mlxlm.generation.distributed import run_worker
        from mlxlm.generation.workers import Workers

        with join_process_group() as group, finish_before_sigterm(group.size):
            if group.size == 1:
                return command(**values)
            if group.rank > 0:
                return run_worker(group, _end)
            with Workers(group, _end) as workers:
                click.get_current_context().meta[_WORKERS] = workers
                return command(**values)

    return option("Memory and speed", "--hosts", str, _HOSTS, metavar="A,B,...", advanced=True)(with_option)


_WORKERS = "mlxlm.workers"


def current_workers() -> Any:
    """The `Workers` of the command; None without `--hosts`."""
    context = click.get_current_context(silent=True)
    return context and context.meta.get(_WORKERS)


def _end(message: str) -> None:
    """End the process, which may wait for another one forever. A terminal gets the settings back that it had."""
    from mlxlm.cli.main import print_error

    print_error(PlatformError(message))
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    if _terminal:
        import termios

        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, _terminal)
    os._exit(1)


_terminal: list[Any] = []


@contextmanager
def finish_before_sigterm(num_processes: int) -> Iterator[None]:
    """Let an error of the block be shown: mlx.launch ends all processes once any of them has failed."""
    try:
        yield
    except BaseException:
        if num_processes > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


def _main() -> NoReturn:
    folder, num_local, *args = sys.argv[1:]
    rank, sharing = int(os.environ["MLX_RANK"]), int(num_local)
    if folder.isdigit():  # rank 0 in place of the process that was started: the input of mlx.launch
        threading.Thread(target=_calm_launcher, args=[int(folder)], daemon=True).start()
        if os.isatty(0):
            import termios

            _terminal.extend(termios.tcgetattr(0))
    else:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that mlx.launch can't write to this process
        if rank == 0:
            _hand_over(Path(folder))
    from mlxlm.backend import device
    from mlxlm.cli.main import main

    device.split_memory_between(sharing)
    if sharing > 1 and sys.platform == "linux":  # else each divides its batches among all cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[rank::sharing] or [cores[rank % len(cores)]])
    sys.argv[1:] = args
    main(args)
    raise AssertionError  # main exits


def _hand_over(folder: Path) -> NoReturn:
    """Give rank 0 the environment that mlx.launch has made, and wait for its end."""
    with open(folder / _ALIVE) as alive:
        written = folder / f"{_ENVIRONMENT}.part"
        written.write_text(json.dumps(dict(os.environ)))
        written.rename(folder / _ENVIRONMENT)
        alive.read()
    sys.exit(0)


def _calm_launcher(descriptor: int) -> None:
    """Write to the processes through mlx.launch, which keeps a core busy until it has found that it can't."""
    with suppress(OSError):
        while True:
            os.write(descriptor, b"\n")
            time.sleep(1)


if __name__ == "__main__":
    _main()
