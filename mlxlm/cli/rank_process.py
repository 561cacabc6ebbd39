"""One of several processes that train together.

As a module this is what `--hosts` and `--num-processes` start on each host: the command line, which reports its process
id and its exit code to the launcher.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxlm.train import ProcessGroup


@contextmanager
def join_ranks() -> Iterator[ProcessGroup]:
    """Join the processes that were started together; one that hangs in MLX ends with an error message."""
    from mlxlm.cli.main import print_error
    from mlxlm.train import join_process_group

    def on_hang(error: Exception) -> None:
        print_error(error)
        _report("exit", 1)
        os._exit(1)

    with join_process_group(on_hang) as process_group:
        try:
            yield process_group
        except BaseException:
            if process_group.size > 1:  # mlx.launch ends all processes as soon as one fails: print the error first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


def _report(name: str, number: int) -> None:
    """Tell the launcher, if there is one, the process id ("pid") or the exit code ("exit")."""
    from mlxlm.train.distributed.launch import LAUNCHED_VARIABLE, REPORT_MARK

    if LAUNCHED_VARIABLE in os.environ:
        print(REPORT_MARK, os.environ["MLX_RANK"], name, number, file=sys.__stdout__, flush=True)


def _end_with_launcher(hostfile: str) -> None:
    """Wait until the launcher, which has locked the hostfile, is gone; then end as after SIGTERM: save and stop.

    After an ordinary run the launcher ends later than this process.
    """
    with open(hostfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    devnull = os.open(os.devnull, os.O_WRONLY)  # nobody reads the output
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    from mlxlm.backend import device
    from mlxlm.cli.main import main

    hostfile, num_local, *args = sys.argv[1:]
    _report("pid", os.getpid())
    rank, sharing = int(os.environ["MLX_RANK"]), int(num_local)
    device.split_memory_between(sharing)
    if sharing > 1 and sys.platform == "linux":  # else each divides its batches among all cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[rank::sharing] or [cores[rank % len(cores)]])
    if rank == 0:
        threading.Thread(target=_end_with_launcher, args=[hostfile], daemon=True).start()
    # mlx.launch polls without a pause whether it can write to stdin, which takes a core, until that fails.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    _report("exit", code)
    return 0 if code > 128 else code  # if one fails, mlx.launch ends the others, but a stopped run ends by itself


if __name__ == "__main__":
    sys.exit(_main())
