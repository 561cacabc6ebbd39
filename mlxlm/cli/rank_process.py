"""One of several processes that train together.

As a module this is what `--hosts` and `--num-processes` start on each host: the command line, which reports its process
id and its exit code to the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxlm.train import ProcessGroup


@contextmanager
def join_ranks() -> Iterator[ProcessGroup]:
    """Join the processes that were started together; one that hangs in MLX ends with an error message."""
    from mlxlm.cli.main import print_error
    from mlxlm.train import ProcessGroup

    def on_hang(error: Exception) -> None:
        print_error(error)
        os._exit(1)

    with ProcessGroup.join(on_hang) as process_group:
        try:
            yield process_group
        except BaseException:
            if process_group.size > 1:  # mlx.launch ends all processes as soon as one fails: print the error first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


def _main() -> int:
    from mlxlm.cli.main import main
    from mlxlm.train.distributed.launch import RankProcess

    secret, hostfile, sharing, *args = sys.argv[1:]
    process = RankProcess(secret, hostfile, int(sharing))
    process.report(sys.__stdout__, "pid", os.getpid())
    code = 1
    try:
        main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    process.report(sys.__stdout__, "exit", code)
    return code


if __name__ == "__main__":
    sys.exit(_main())
