"""Runs a command on several hosts, or in several processes on this one."""

from __future__ import annotations

import sys

from mlxlm.cli import render
from mlxlm.cli.stop_signals import on_stop_signal


def launch(hosts: str, args: list[str]) -> int:
    """Run `mlxlm ARGS` on all of `hosts`; returns the exit code: 0 if all of them returned 0."""
    from mlxlm.train.distributed.hostfile import make_hostfile
    from mlxlm.train.distributed.launch import LaunchedProcesses

    processes = LaunchedProcesses(make_hostfile(hosts), "mlxlm.cli.rank_process", args)
    with on_stop_signal(lambda number, _frame: processes.stop(number)):
        processes.run(sys.stdout.buffer, sys.stderr.buffer)
    for rank in range(processes.num_processes):
        if rank not in processes.exit_codes:
            render.say(f"rank {rank} has ended without an exit code: it was killed, or its machine is gone")
    return processes.exit_code


def strip_options(args: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return a command line without these options, which take a value each."""
    remaining, rest = [], iter(args)
    for arg in rest:
        if arg in flags:
            next(rest, None)
        elif not arg.startswith(tuple(f"{flag}=" for flag in flags)):
            remaining.append(arg)
    return remaining
