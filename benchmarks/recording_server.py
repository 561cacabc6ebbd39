"""`mlxlm serve` that also writes what its engines generate to a file: a pickled dictionary per text, as it ends.

    python benchmarks/recording_server.py FILE MODEL [OPTION OF mlxlm serve]...

A dictionary has the `request` with its seed, the `tokens` that its client got, how many tokens of the prompt were
`cached`, the tokens `known` whose keys and values were computed, and when the text `began` and `ended`: numbers that
grow.
"""

from __future__ import annotations

import pickle
import sys
from array import array
from itertools import count
from typing import IO, Any

from mlxlm.cli.main import main
from mlxlm.generation.engine import Engine
from mlxlm.generation.request import Request


def record(file: IO[bytes]) -> None:
    """Write every text of every engine to `file`."""
    submit, clock = Engine.submit, count()

    def recording(engine: Engine, request: Request, **settings: Any) -> Any:
        began, stream = next(clock), submit(engine, request, **settings)

        def write() -> None:
            result = stream.result()
            # The last token was never read. A client may leave before the whole prompt was.
            held = [*request.prompt, *result.tokens[:-1]]
            known = held if stream.num_generated else held[: stream.num_read]
            turn = {"request": stream.request, "tokens": result.tokens, "cached": result.cached_tokens}
            turn |= {"known": array("i", known), "began": began, "ended": next(clock)}
            file.write(pickle.dumps(turn))  # at once: the texts of several threads

        stream.add_done_callback(write)
        return stream

    Engine.submit = recording  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    with open(sys.argv.pop(1), "wb", buffering=0) as out:
        record(out)
        sys.argv.insert(1, "serve")
        main()
