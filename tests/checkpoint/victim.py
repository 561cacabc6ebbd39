"""A child process that opens checkpoints, so that a crash, a hang or memory taken is seen from outside.

Reads one path per line; answers one line of JSON each: `errors` (an MlxlmError's text per stage that failed),
`stray` (the traceback of anything else), processor `seconds`, and megabytes of memory above the start, `growth`.
"""

import json
import resource
import sys
import time
import traceback

TEXT = "The cat, naïve 猫 <s> <|end|>\n\n  12 birds 🎉\0."
LIMIT = 8 << 30  # bytes of address space beyond what the imports took: an allocation out of bounds fails at once


def peak() -> float:
    """The most memory that this process has had, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def stages(path: str):
    """What a user does with a checkpoint, each stage a function without arguments."""
    from mlxlm.backend.mlx import mx
    from mlxlm.checkpoint.load import load_checkpoint
    from mlxlm.checkpoint.open import open_checkpoint

    opened = []

    def describe() -> None:
        opened.append(open_checkpoint(path))

    def read() -> None:
        for name, tensor in opened[0].tensors.items():
            value = tensor.read()
            mx.eval(value)
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), name

    def tokenize() -> None:
        tokenizer = opened[0].load_tokenizer()
        ids = tokenizer.encode(TEXT)
        tokenizer.decode(ids)
        tokenizer.encode(TEXT, parse_special=True)

    def run() -> None:
        model, _ = load_checkpoint(opened[0])
        mx.eval(model(mx.array([[1, 2, 3]])))

    yield describe
    if opened:
        yield read
        yield tokenize
        if opened[0].config is not None:
            yield run


def answer(path: str) -> dict:
    from mlxlm.utils.errors import MlxlmError

    errors, stray = [], None
    started = time.process_time()
    for stage in stages(path):
        try:
            stage()
        except MlxlmError as error:
            errors.append(str(error))
        except BaseException:  # also what a Rust library panics with
            stray = traceback.format_exc()
    return {"errors": errors, "stray": stray, "seconds": time.process_time() - started}


def main() -> None:
    paths = (line.rstrip("\n") for line in sys.stdin)
    answer(next(paths))  # a whole file first: what is imported on the way is not what a broken one costs
    base = peak()
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, held + LIMIT))
    print("ready", flush=True)
    for path in paths:
        print(json.dumps({**answer(path), "growth": peak() - base}), flush=True)


if __name__ == "__main__":
    main()
