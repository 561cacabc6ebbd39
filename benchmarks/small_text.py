r"""Bits per byte on the last 10% of a text, after training on its first 90% for some minutes.

    python benchmarks/small_text.py tinyshakespeare.txt --minutes 10 [OPTIONS OF mlxlm pretrain]

This is `mlxlm pretrain --minutes`, which picks the model size unless --preset or --config is given. The time is that of
the whole command, from training the tokenizer to the last checkpoint; CPU minutes of all cores are printed too. The
best checkpoint is evaluated on the whole held-out text: in windows of the training length without overlap, and with a
stride of a quarter window, so that tokens have at least three quarters of a window before them.

Results on two cores of an AMD EPYC, at 10 to 30 epochs:

    tinyshakespeare.txt --minutes 10                                                                  2.072
    tinyshakespeare.txt --minutes 4 --preset 1m --vocab-size 1024 --batch-size 8 --max-seq-length 256 \
        --weight-decay 1.0                                                                            2.069
    tinyshakespeare.txt --minutes 10 --preset 1m --vocab-size 1024 --batch-size 8 --max-seq-length 256 \
        --set hidden_size=192 --set num_hidden_layers=6 --set intermediate_size=512 \
        --set num_attention_heads=6 --set num_key_value_heads=6 \
        --weight-decay 1.2 --dropout 0.1 --min-lr-ratio 0.02                                          2.026
    wikitext2-valid.txt --minutes 30, the same with 6.6M parameters (hidden_size=256, 8 layers, 4 heads of 64,
        intermediate_size=688)                                                                        1.888

Reference on tinyshakespeare: nanoGPT's CPU recipe (0.8M parameters, characters) ends at 1.88 nats per character, that
is 2.71 bits per byte, in about three minutes.
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
        mlxlm("pretrain", training, "--validation", held_out, "--out", path, "--minutes", options.minutes, *given)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        run = Run.open(path)
        length = run.settings.max_seq_length
        plain, strided = (bits_per_byte(path, held_out, length, stride) for stride in (length, length // 4))
        parameters, facts = run.config.parameter_count(), read_run(path)
        steps, passes = int(facts.last("step")), facts.last("tokens") / Manifest.read(run.data).train.tokens
    cpu = used.ru_utime + used.ru_stime
    rows = [
        ("parameters", f"{parameters:,}"),
        ("steps", f"{steps:,}, {passes:.1f} epochs"),
        ("held-out text", f"{plain:.4f} bits per byte, {strided:.4f} with a stride of {length // 4}"),
        ("time", f"{seconds:.0f} s, {cpu / 60:.1f} CPU minutes"),
        ("peak memory", f"{used.ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB"),
    ]
    results = {
        "benchmark": "small_text", "text": options.text.name, "options": shlex.join(given), "bits_per_byte": plain,
        "strided": strided, "seconds": seconds, "cpu_seconds": cpu, "parameters": parameters, "steps": steps,
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


def bits_per_byte(run: Path, text: Path, length: int, stride: int) -> float:
    results = mlxlm("evaluate", run, text, "--context-length", length, "--stride", stride, "--json", capture=True)
    return json.loads(results)["bits_per_byte"]


def mlxlm(*arguments: object, capture: bool = False) -> str:
    """Run a command of mlxlm; returns its output."""
    command = [str(Path(sys.executable).with_name("mlxlm")), *map(str, arguments)]
    out = subprocess.PIPE if capture else sys.stderr
    return subprocess.run(command, check=True, stdout=out, text=True).stdout or ""


if __name__ == "__main__":
    main()
