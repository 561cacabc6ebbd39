"""One of several processes that train together.

As a module this is what `mlxlm ... --hosts` has `mlx.launch` start on each host: the command line, which says when it
begins and ends. `mlx.launch` itself passes on neither process numbers nor exit codes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mlxlm.backend import device

if TYPE_CHECKING:
    from mlxlm.train import ProcessGroup

LAUNCHER_MARK = "\x1e"  # begins the lines for the launcher: no text on stdout has ASCII's record separator


@contextmanager
def join_ranks() -> Iterator[ProcessGroup]:
    """This process among those that were started with it; where it can't get away from them, it ends with an error."""
    from mlxlm.cli.main import print_error
    from mlxlm.train import ProcessGroup

    def end(error: Exception) -> None:
        print_error(error)
        os._exit(1)

    with ProcessGroup.join(on_hang=end) as ranks:
        try:
            yield ranks
        except BaseException:
            if ranks.size > 1:  # mlx.launch ends all processes as soon as one fails: this one tells why it does, first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


def report(secret: str, *words: object) -> None:
    """A line for the launcher that started this process."""
    rank = os.environ.get("MLX_RANK", "0")
    print(f"{LAUNCHER_MARK}{secret}", rank, *words, file=sys.__stdout__, flush=True)


def limit_to_share(rank: int, ranks: int) -> None:
    """Leave this process its share of the memory and of the cores that it may use, where `ranks` processes have to
    share them; of the cores if the system knows such a limit."""
    device.split_memory_between(max(1, ranks))
    if ranks > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        os.sched_setaffinity(0, own or [cores[rank % len(cores)]])


def _outlive(hostfile: str) -> None:
    """Wait for the end of the launcher, which has locked its hostfile; then end as after SIGTERM, and with this process
    the others. The launcher's own end in order comes later than this process's."""
    with open(hostfile) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    with suppress(OSError):
        os.unlink(hostfile)
    nowhere = os.open(os.devnull, os.O_WRONLY)  # nobody reads what is said
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    from mlxlm.cli.main import main

    secret, hostfile, sharing, *args = sys.argv[1:]
    rank = int(os.environ.get("MLX_RANK", "0"))
    limit_to_share(rank, int(sharing))
    if rank == 0:
        threading.Thread(target=_outlive, args=[hostfile], daemon=True).start()
    # mlx.launch looks without a pause whether it can write to stdin, which takes a core, until that fails.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    report(secret, "pid", os.getpid())
    code = 1
    try:
        main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    report(secret, "exit", code)
    return code


if __name__ == "__main__":
    sys.exit(_main())
