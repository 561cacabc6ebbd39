r"""Bits per byte on the last 10% of a text, after training on its first 90% for some minutes, beside PPMd.

    python benchmarks/small_text.py tinyshakespeare.txt --minutes 10 [OPTIONS OF mlxlm pretrain]

This is `mlxlm pretrain --minutes`, which picks the model size unless --preset or --config is given, and the best
checkpoint by its own validation: the last 10% choose nothing. The time is that of the whole command, from training the
tokenizer to the last checkpoint; CPU minutes of all cores are printed too. `mlxlm evaluate --adapt` then gives the bits
per byte of the whole held-out text with default windows, with fixed weights and with weights that learn each window
after it was predicted.

PPMd (`pip install pyppmd`, Ppmd8, the best order of 4 to 12) adapts, too: its bits are those that the text takes
beyond its first 90%.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report

from mlxlm.data import Manifest
from mlxlm.report import read_run
from mlxlm.train import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--run", type=Path, help="a new folder to keep the run in")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        training, held_out = split(options.text, Path(folder))
        path = options.run or Path(folder, "run")
        start = time.perf_counter()
        mlxlm("pretrain", training, "--out", path, "--minutes", options.minutes, *given)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        found, run = evaluated(path, held_out), Run.open(path)
        ppmd = ppmd_bits_per_byte(training.read_bytes(), held_out.read_bytes())
        parameters, facts = run.config.parameter_count(), read_run(path)
        steps, passes = int(facts.last("step")), facts.last("tokens") / Manifest.read(run.data).train.tokens
    cpu = used.ru_utime + used.ru_stime
    rows = [
        ("parameters", f"{parameters:,}"),
        ("steps", f"{steps:,}, {passes:.1f} epochs"),
        ("held-out text", f"{found['bits_per_byte']:.4f} bits per byte"),
        ("adapted", f"{found['adapted']['bits_per_byte']:.4f} bits per byte"),
        ("PPMd", "pyppmd is not installed" if ppmd is None else f"{ppmd:.4f} bits per byte"),
        ("time", f"{seconds:.0f} s, {cpu / 60:.1f} CPU minutes"),
        ("peak memory", f"{used.ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB"),
    ]
    results = {
        "benchmark": "small_text", "text": options.text.name, "options": shlex.join(given),
        "bits_per_byte": found["bits_per_byte"], "adapted": found["adapted"]["bits_per_byte"], "ppmd": ppmd,
        "seconds": seconds, "cpu_seconds": cpu, "parameters": parameters, "steps": steps,
    }  # fmt: skip
    report(f"{options.text.name} in {options.minutes:g} minutes", rows, results)


def split(text: Path, folder: Path) -> tuple[Path, Path]:
    """Write the first 90% of the text and the rest to files, split at a line end."""
    content = text.read_bytes()
    cut = content.index(b"\n", len(content) * 9 // 10) + 1
    parts = folder / "train.txt", folder / "validation.txt"
    for part, piece in zip(parts, (content[:cut], content[cut:]), strict=True):
        part.write_bytes(piece)
    return parts


def evaluated(run: Path, text: Path) -> dict[str, Any]:
    """Evaluate the best checkpoint of a run, with fixed and with adapted weights."""
    return json.loads(mlxlm("evaluate", run, text, "--adapt", "--json", capture=True))


def ppmd_bits_per_byte(training: bytes, held_out: bytes) -> float | None:
    """Return the bits per byte of `held_out` behind `training`, by the best order; None without pyppmd."""
    try:
        import pyppmd
    except ImportError:
        return None
    texts = training, training + held_out
    sizes = [
        [len(pyppmd.compress(text, max_order=order, mem_size=256 << 20)) for text in texts] for order in range(4, 13)
    ]
    return min(8 * (both - first) / len(held_out) for first, both in sizes)


def mlxlm(*arguments: object, capture: bool = False) -> str:
    """Run a command of mlxlm; returns its output."""
    command = [str(Path(sys.executable).with_name("mlxlm")), *map(str, arguments)]
    out = subprocess.PIPE if capture else sys.stderr
    return subprocess.run(command, check=True, stdout=out, text=True).stdout or ""


if __name__ == "__main__":
    main()
