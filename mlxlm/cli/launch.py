"""Starts a command on several hosts, or several times on this one, by `mlx.launch`, and stays in charge of it."""

from __future__ import annotations

import fcntl
import json
import os
import re
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
from pathlib import Path
from typing import IO, Any

from mlxlm.backend import platform
from mlxlm.cli import render
from mlxlm.cli.rank_process import LAUNCHER_MARK
from mlxlm.cli.stop_signals import on_stop_signal
from mlxlm.utils import bounded_reads
from mlxlm.utils.errors import ConfigError, PlatformError

_LOCAL = "127.0.0.1"  # what mlx.launch starts without ssh
# Seconds in which all have to end after one has: rank 0 saves, on a disk that may be slow, and nobody else.
_AFTER_RANK_0, _AFTER_ANOTHER = 30.0, 600.0
_BACKENDS = ("ring", "jaccl")
# What MLX says of connections and exits, several threads at once; we tell it ourselves.
_NOISE = (b"[ring]", b"closed by the peer", b"Too many send/recv", b"[WARN] Node with rank")
_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def make_hostfile(hosts: str | None, num_processes: int | None) -> dict[str, Any]:
    """MLX's hostfile for `--hosts`, names or addresses or a hostfile's path, or for `num_processes` processes on this machine.

    This machine has to come first: it leads the run and has its folder. Raises ConfigError.
    """
    if hosts is None:
        if num_processes > max(2, cores := platform.cpu_cores()):
            raise ConfigError(
                f"{num_processes} processes for {cores} cores", f"--num-processes {max(2, cores)} or fewer"
            )
        content: dict[str, Any] = {"hosts": [{"ssh": _LOCAL, "ips": [_LOCAL]}] * num_processes}
    elif hosts.endswith(".json") and not Path(hosts).exists():
        raise ConfigError(f"--hosts: there is no file {hosts}", "the path of a hostfile, or names, a,b,c")
    elif Path(hosts).is_file():
        content = _read_hostfile(Path(hosts))
    else:
        content = {"hosts": [_host(name.strip()) for name in hosts.split(",")]}
    entries = content["hosts"]
    if len(entries) < 2:
        raise ConfigError(
            "one host is no reason to launch", "two or more, or the command without --hosts and --num-processes"
        )
    content = {
        "backend": "ring",
        **content,
        "hosts": [{**h, "ssh": _LOCAL if _is_own(h) else h["ssh"]} for h in entries],
    }
    local = [h for h in content["hosts"] if h["ssh"] == _LOCAL]
    if content["hosts"][0]["ssh"] != _LOCAL:
        raise ConfigError(f"{entries[0]['ssh']} is not this machine, which leads the run", "this machine first")
    if len(local) < len(entries) and any(ip.startswith("127.") for h in local for ip in h["ips"]):
        raise ConfigError("other machines can't reach this one as localhost", "its name or address in the network")
    return content


def launch(content: dict[str, Any], args: list[str]) -> int:
    """Run `mlxlm ARGS` on the hosts of a hostfile; returns the exit code: 0 if all of them gave 0.

    Their stdout and stderr go to this process's. Ctrl-C and SIGTERM go to the first, which ends the others in order;
    so it does when this process is killed. Processes of one machine have equal shares of its cores. Raises
    PlatformError where there is no mlx.launch.
    """
    count, secret = len(content["hosts"]), secrets.token_hex(8)
    program = shutil.which("mlx.launch", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise PlatformError("mlx.launch, which comes with MLX, is not there", "pip install --upgrade mlx")
    local = sum(host["ssh"] == _LOCAL for host in content["hosts"])
    sharing = local if local == count else 1
    threads = str(max(1, platform.cpu_cores() // sharing))  # a BLAS counts the cores before `ranked` takes its share
    share = [f"{name}={threads}" for name in _THREADS if sharing > 1 and name not in os.environ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)  # how rank 0 knows that this process lives
        command = [program, "--hostfile", file.name, "--starting-port", str(_free_ports(count))]
        command += [word for setting in share for word in ("--env", setting)]
        command += ["--", sys.executable, "-m", "mlxlm.cli.rank_process", secret, file.name, str(sharing), *args]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # A session of its own: a terminal's Ctrl-C would reach all processes, and end mlx.launch before them.
        with subprocess.Popen(command, **pipes, start_new_session=True) as process:
            return _Group(process, count, f"{LAUNCHER_MARK}{secret} ".encode()).run()


def strip_options(args: list[str], flags: tuple[str, ...]) -> list[str]:
    """A command line but for these options, which take a value each."""
    kept, rest = [], iter(args)
    for word in rest:
        if word in flags:
            next(rest, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
    return kept


class _Group:
    """The processes that one mlx.launch has started."""

    def __init__(self, process: subprocess.Popen, count: int, sign: bytes):
        self._process, self._count, self._sign = process, count, sign
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ended: float | None = None  # when the last one that has did
        self._signals = 0

    def run(self) -> int:
        readers = [
            threading.Thread(target=self._pass_on, args=pipes, daemon=True)
            for pipes in ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        ]
        for reader in readers:
            reader.start()
        with on_stop_signal(self._on_signal):
            while self._process.poll() is None:
                time.sleep(0.05)
                patience = _AFTER_RANK_0 if 0 in self._codes else _AFTER_ANOTHER
                if self._ended is not None and time.monotonic() - self._ended > patience:
                    self._signal_all(signal.SIGKILL)
        for reader in readers:
            reader.join(timeout=5)
        for rank in sorted({*range(self._count)} - {*self._codes}):
            render.say(f"rank {rank} has ended without an exit code: it was killed, or its machine is gone")
        codes = [self._codes.get(rank, 1) for rank in range(self._count)]
        return codes[0] or max(codes)

    def _pass_on(self, source: IO[bytes], target: IO[bytes]) -> None:
        for line in source:
            if line.startswith(self._sign):
                self._note(*line[len(self._sign) :].split())
            elif not any(noise in line for noise in _NOISE):
                try:
                    target.write(line)
                    target.flush()
                except OSError:  # read on all the same: the processes wait where their pipe is full
                    os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())

    def _note(self, rank: bytes, what: bytes, number: bytes) -> None:
        if what == b"pid":
            self._pids[int(rank)] = int(number)
            if len(self._pids) == self._count:  # nobody reads it, which mlx.launch learns by trying: see `ranked`
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
        else:
            self._codes[int(rank)] = int(number)
            self._ended = time.monotonic()

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first asks rank 0 to finish its step, the second to stop at once; the third kills. The end of a terminal
        is told more than once, see `StopRequest`."""
        if number == signal.SIGHUP and self._signals:
            return
        self._signals += 1
        if self._signals > 2:
            self._signal_all(signal.SIGKILL)
        elif 0 in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[0], signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        else:
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _read_hostfile(path: Path) -> dict[str, Any]:
    hint = 'MLX\'s form, [{"ssh": "a", "ips": ["10.0.0.1"]}, ...], as mlx.distributed_config writes it'
    try:
        content = json.loads(bounded_reads.read_bytes(path, 1 << 20, ConfigError))
        content = content if isinstance(content, dict) else {"hosts": content}
        for host in content["hosts"]:
            if not (isinstance(host["ips"], list) and host["ips"] and all(map(_is_name, [host["ssh"], *host["ips"]]))):
                raise TypeError
        envs, backend = content.get("envs", []), content.get("backend", "ring")
        if not (isinstance(envs, list) and all(isinstance(env, str) for env in envs)):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is not a hostfile", hint) from None
    if backend not in _BACKENDS:
        raise ConfigError(f"{path}: backend is {backend!r}, it must be one of {', '.join(_BACKENDS)}")
    return content


def _is_name(text: Any) -> bool:
    """Whether this can be a host's name or address, and no option of ssh."""
    return isinstance(text, str) and re.fullmatch(r"[\w\[][\w.:%@\[\]-]*", text) is not None


def _host(name: str) -> dict[str, Any]:
    try:
        if not _is_name(name):  # an empty one has the address 0.0.0.0
            raise OSError
        return {"ssh": name, "ips": [socket.gethostbyname(name.rpartition("@")[2])]}
    except (OSError, UnicodeError):
        raise ConfigError(f"--hosts: {name or 'an empty name'} has no address", "names or addresses, a,b,c") from None


def _is_own(host: dict[str, Any]) -> bool:
    """Whether an address of the host is this machine's: a socket can be bound to it."""
    with socket.socket() as probe, suppress(OSError):
        probe.bind((host["ips"][0], 0))
        return True
    return False


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free here: runs of one machine must not meet each other."""
    for _ in range(100):
        first = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError, OverflowError):
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
            return first
    raise PlatformError("there are no free ports for the processes of the run")
