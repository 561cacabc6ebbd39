r"""What parts of a recipe do for a small model: bits per byte and CPU time of `mlxlm pretrain` with and without them.

    python benchmarks/recipes.py tinyshakespeare.txt --tokens 3e6 --seeds 5 [--only "dropout 0.1,muon"]
    python benchmarks/recipes.py TEXT --tokens 3e6 --base "--preset 1m" --try "rows of 64: --max-seq-length 64"

Every variant changes the options of the base, and trains with the same seeds on the first 90% of the text. The last 10%
choose nothing: they are predicted by the best checkpoint of the run's own validation, with the default windows of
`mlxlm evaluate`. Differences are means over seeds with the standard error of the paired differences. Each run has one
core to itself, so runs can be made on all cores at once; `--out FOLDER` keeps their results, and skips those it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import report
from small_text import split

BASE = (
    "--preset 1m --vocab-size 1024 --set hidden_size=96 --set num_hidden_layers=3 --set num_attention_heads=3 "
    "--set num_key_value_heads=3 --set intermediate_size=256 --batch-size 8 --max-seq-length 128 --eval-every 0"
)
VARIANTS = {
    "weight decay 0.3": "--weight-decay 0.3",
    "weight decay 1.0": "--weight-decay 1.0",
    "dropout 0.1": "--dropout 0.1",
    "EMA 0.99": "--ema-decay 0.99",
    "muon": "--optimizer muon",
    "QK-norm": "--set qk_norm=head",
    "ReLU²": "--set feed_forward=relu2 --set intermediate_size=384",
    "rows of 64": "--max-seq-length 64 --batch-size 16",
    "rows of 256": "--max-seq-length 256 --batch-size 4",
    "4 rows": "--batch-size 4",
    "16 rows": "--batch-size 16",
    "vocabulary 512": "--vocab-size 512",
    "vocabulary 2,048": "--vocab-size 2048",
    "vocabulary 4,096": "--vocab-size 4096",
    "WSD": "--lr-schedule wsd",
    "final rate 0.02": "--min-lr-ratio 0.02",
    "half the rate": "--learning-rate 0.0027",
    "twice the rate": "--learning-rate 0.011",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=float, default=3e6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--base", default=BASE, help="options of every run")
    parser.add_argument("--only", help="names of variants, separated by commas")
    parser.add_argument("--try", action="append", default=[], metavar="NAME:OPTIONS", help="variants instead of these")
    parser.add_argument("--out", type=Path, help="a folder for results")
    options = parser.parse_args()
    given = dict(text.split(":", 1) for text in vars(options)["try"])
    variants = given or {name: VARIANTS[name] for name in (options.only.split(",") if options.only else VARIANTS)}
    with tempfile.TemporaryDirectory() as folder:
        results = Runs(options, Path(folder)).all({"base": ""} | variants)
    base, rows = results.pop("base"), []
    rows.append(("base", f"{mean(base, 'bits_per_byte'):.4f}          {mean(base, 'cpu_seconds'):.0f} CPU s"))
    for name, runs in results.items():
        differences = [run["bits_per_byte"] - other["bits_per_byte"] for run, other in zip(runs, base, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
        cpu = mean(runs, "cpu_seconds") / mean(base, "cpu_seconds")
        rows.append((name, f"{statistics.mean(differences):+.4f} ± {error:.4f}  {cpu:.2f} of the CPU time"))
    title = f"{options.text.name}, {options.tokens:.2g} tokens, {options.seeds} seeds: bits per byte, and their change"
    report(title, rows, {"benchmark": "recipes", "text": options.text.name, "base": base, **results})


def mean(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


class Runs:
    """Makes the runs, one on each core at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self._options, self._folder = options, folder
        self._training, self._held_out = split(options.text, folder)
        if options.out is not None:
            options.out.mkdir(exist_ok=True)

    def all(self, variants: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
        """Return the results of each variant, by seed."""
        seeds, cores = range(self._options.seeds), queue.SimpleQueue()
        for core in sorted(os.sched_getaffinity(0)):
            cores.put(core)

        def result(seed: int, name: str) -> dict[str, Any]:
            core = cores.get()
            try:
                found = self._result(name, variants[name], seed, core)
            finally:
                cores.put(core)
            print(f"{name}, seed {seed}: {json.dumps(found)}", file=sys.stderr)
            return found

        with ThreadPoolExecutor(cores.qsize()) as pool:  # all variants with the first seed first
            found = {key: pool.submit(result, *key) for key in itertools.product(seeds, variants)}
        return {name: [found[seed, name].result() for seed in seeds] for name in variants}

    def _result(self, name: str, changes: str, seed: int, core: int) -> dict[str, Any]:
        options, out = self._options, self._options.out
        replaced = {part.split("=")[0] for part in changes.split() if "=" in part}  # of --set: given once
        base = [pair for pair in options.base.split(" --") if pair.removeprefix("set ").split("=")[0] not in replaced]
        arguments = f"{' --'.join(base)} {changes} --tokens {options.tokens:g} --seed {seed}"
        saved = out and out / (f"{options.text.stem} {name} {options.tokens:g} {seed}".replace("/", "-") + ".json")
        if saved and saved.exists() and (result := json.loads(saved.read_text()))["options"] == arguments:
            return result
        run = self._folder / f"run {name} {seed}"
        seconds, _ = self._command(core, "pretrain", self._training, "--out", run, *shlex.split(arguments))
        _, output = self._command(core, "evaluate", run, self._held_out, "--json")
        result = {"options": arguments, "cpu_seconds": seconds, "bits_per_byte": json.loads(output)["bits_per_byte"]}
        if saved:
            saved.write_text(json.dumps(result))
        return result

    def _command(self, core: int, *arguments: object) -> tuple[float, str]:
        """Run a command of mlxlm on one core; returns its CPU seconds and its output."""
        command = ["taskset", "-c", str(core), str(Path(sys.executable).with_name("mlxlm")), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            output = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                raise SystemExit(f"{shlex.join(command)} failed: {errors.read()}")
        return used.ru_utime + used.ru_stime, output


if __name__ == "__main__":
    main()
