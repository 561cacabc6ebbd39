"""What weights and optimizer state in fewer bits cost: bits per byte of the held-out text after the same steps.

    python benchmarks/training_precision.py TEXT [--steps 300] [--seeds 3] [--settings optimizer_state=int8,...]

A model of 0.3M parameters, vocabulary 512, batches of 4 x 128 tokens, the learning rate of `mlxlm pretrain`. A setting
is one or more fields of `TrainSettings`, joined by "+". All settings of a seed have the same weights and batches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import report, train_settings

SETTINGS = (
    "optimizer=adamw,optimizer_state=bfloat16,optimizer_state=int8,param_dtype=bfloat16,"
    "param_dtype=bfloat16+optimizer_state=int8"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", default=SETTINGS)
    options = parser.parse_args()
    names = options.settings.split(",")
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for name in names:
                bits = bits_per_byte(Path(folder), options.text, options.steps, seed, train_settings(name))
                found[name].append(bits)
                print(f"seed {seed}, {name}: {bits:.4f}", file=sys.stderr, flush=True)
    rows = []
    for name, bits in found.items():
        differences = [a - b for a, b in zip(bits, found[names[0]], strict=True)]
        error = statistics.stdev(differences) / len(bits) ** 0.5 if len(bits) > 1 else 0.0
        rows.append(
            (name, f"{statistics.mean(bits):.4f}, difference {statistics.mean(differences):+.4f} ± {error:.4f}")
        )
    report(f"bits per byte after {options.steps} steps", rows, {"benchmark": "training_precision", "runs": found})


def bits_per_byte(folder: Path, text: str, steps: int, seed: int, values: dict[str, Any]) -> float:
    """Train a model in `folder`; the first one prepares the text for all."""
    from mlxlm.families import load_preset
    from mlxlm.tokenizer import load
    from mlxlm.train import Finished, TokenizerOptions, start_run, train

    shape = {"batch_size": 4, "max_seq_length": 128, "eval_every": 0, "save_every": 0, "eval_tokens": 1 << 16}
    first = folder / "first" / "data"
    data, tokenizer = ([first], None) if first.exists() else ([text], TokenizerOptions(vocab_size=512))
    out = folder / "first" if not first.exists() else folder / f"{seed} {values}"
    settings = {**shape, "steps": steps, "seed": seed, **values}
    run = start_run(out, data, load_preset("0.3m"), tokenizer=tokenizer, settings=settings)
    *_, ending = train(run, load(run.path))
    assert isinstance(ending, Finished) and ending.bits_per_byte is not None
    return ending.bits_per_byte


if __name__ == "__main__":
    main()
