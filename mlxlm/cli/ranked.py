"""One of several processes that train together.

As a module this is what `mlxlm ... --hosts` has `mlx.launch` start on each host: the command line, which says when it
begins and ends. `mlx.launch` itself passes on neither process numbers nor exit codes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxlm.train import Ranks

SIGN = "\x1e"  # begins the lines for the launcher: no text on stdout has ASCII's record separator


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that were started with it; where it can't get away from them, it ends with an error."""
    from mlxlm.cli.main import print_error
    from mlxlm.train import Ranks

    def end(error: Exception) -> None:
        print_error(error)
        os._exit(1)

    with Ranks.join(when_stuck=end) as ranks:
        try:
            yield ranks
        except BaseException:
            if ranks.size > 1:  # mlx.launch ends all processes as soon as one fails: this one tells why it does, first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


def report(secret: str, *words: object) -> None:
    """A line for the launcher that started this process."""
    rank = os.environ.get("MLX_RANK", "0")
    print(f"{SIGN}{secret}", rank, *words, file=sys.__stdout__, flush=True)


def _main() -> int:
    from mlxlm.cli.main import main

    secret, *args = sys.argv[1:]
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
