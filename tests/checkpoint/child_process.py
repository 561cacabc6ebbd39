"""Open checkpoints in a child process, so that a crash, a hang or growing memory doesn't harm the tests.

Run as a script, it reads one path per line and answers with one line of JSON: `errors` (the text of an MlxlmError per
stage that failed), `traceback` (of anything else), processor `seconds`, and `growth` in megabytes of memory. A line
that starts with "+" is a valid checkpoint: it is opened first, so that imports do not count as growth.
"""

from __future__ import annotations

import json
import resource
import selectors
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

MAX_MEMORY = 200  # MB that a damaged file may cost
MAX_SECONDS = 3.0  # of processor time; one on an idle machine
TIMEOUT = 20.0  # seconds by the clock, on a busy machine
ADDRESS_SPACE = 8 << 30  # bytes beyond those of the imports: a huge allocation fails immediately
TEXT = "The cat, naïve 猫 <s> <|end|>\n\n  12 birds 🎉\0."


class ChildProcess:
    """Opens checkpoints in a child process, which is started again after it ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.valid: Path | None = None

    def open(self, path: Path, valid: Path) -> dict:
        """Open a damaged checkpoint; `valid` is one of the same kind.

        Returns the child's answer; `ended` says why if there is none.
        """
        if self.process is None:
            command = [sys.executable, __file__]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.valid = None
        if self.valid != valid:
            self.valid = valid
            answer = self._request(f"+{valid}", timeout=120)
            if not answer or json.loads(answer)["errors"]:
                raise AssertionError(f"a valid checkpoint can't be opened: {valid} {answer}")
        answer = self._request(str(path), TIMEOUT)
        if not answer:
            return {"errors": [], "traceback": None, "ended": self.close(), "seconds": 0, "growth": 0}
        result = json.loads(answer)
        if result["growth"] > MAX_MEMORY:  # the peak never falls: measure the next one in a new process
            self.close()
        return {**result, "ended": None}

    def _request(self, line: str, timeout: float) -> str:
        """Send a line and return the answer; "" if the child ended or takes too long."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return self.process.stdout.readline() if selector.select(timeout) else ""

    def close(self) -> str:
        """End the process; say how it had ended by itself."""
        if self.process is None:
            return ""
        try:
            self.process.stdin.close()
            reason = f"it ended with {self.process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            reason = "it hung"
        self.process.stdout.close()
        self.process = None
        return reason


def complaint(result: dict, name: str) -> str | None:
    """What is wrong with the result for a damaged file below `name`; None if nothing is."""
    if result["ended"] or result["traceback"]:
        return result["ended"] or result["traceback"]
    if result["seconds"] > MAX_SECONDS:
        return f"{result['seconds']:.1f} s"
    if result["growth"] > MAX_MEMORY:
        return f"{result['growth']:.0f} MB"
    for error in result["errors"]:
        if "\n" in error or name not in error:
            return f"not one line that names the file: {error}"
    return None


def peak_memory() -> float:
    """Peak memory of this process in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def stages(path: str) -> Iterator:
    """What a user does with a checkpoint, each stage a function without arguments."""
    from mlxlm.backend.mlx import mx
    from mlxlm.checkpoint import Checkpoint, load_checkpoint, open_checkpoint

    checkpoints = []

    def describe() -> None:
        checkpoints.append(open_checkpoint(path))

    def read() -> None:
        for name, tensor in checkpoints[0].tensors.items():
            value = tensor.read()
            mx.eval(value)
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), name

    def tokenize() -> None:
        tokenizer = checkpoints[0].load_tokenizer()
        tokenizer.decode(tokenizer.encode(TEXT))
        tokenizer.encode(TEXT, parse_special=True)

    def run() -> None:
        model, _ = load_checkpoint(checkpoints[0])
        mx.eval(model(mx.array([[1, 2, 3]])))

    yield describe
    if checkpoints:
        yield read
        yield tokenize
        if isinstance(checkpoints[0], Checkpoint):
            yield run


def answer(path: str) -> dict:
    """Run the stages on one checkpoint."""
    from mlxlm.utils.errors import MlxlmError

    errors, unexpected = [], None
    start = time.process_time()
    for stage in stages(path):
        try:
            stage()
        except MlxlmError as error:
            errors.append(str(error))
        except BaseException:  # also the panics of Rust libraries
            unexpected = traceback.format_exc()
    return {"errors": errors, "traceback": unexpected, "seconds": time.process_time() - start}


def main() -> None:
    """Answer each line of standard input."""
    base = None
    for line in sys.stdin:
        result = answer(line.rstrip("\n").removeprefix("+"))
        if base is None and sys.platform == "linux":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
        if line.startswith("+"):
            base = peak_memory()
        print(json.dumps({**result, "growth": peak_memory() - base}), flush=True)


if __name__ == "__main__":
    main()
