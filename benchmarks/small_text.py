"""Bits per byte on a text's last 10% after training on its first 90% for a given time.

    python benchmarks/small_text.py tinyshakespeare.txt --minutes 3 --preset 1m --vocab-size 1024

The clock starts before the tokenizer is trained and stops after the last step. What counts is the checkpoint
with the lowest validation loss (--eval-every), over the whole of the held-out text. Reference on
tinyshakespeare: nanoGPT's CPU recipe (0.8M parameters, characters) ends at 1.88 nats per character, that is
2.71 bits per byte, in about three minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import peak_memory, report

from mlxlm.config import ModelConfig
from mlxlm.data import TokenDataset
from mlxlm.evaluate import evaluate
from mlxlm.tokenizer import load
from mlxlm.train import Finished, Run, Validation, start_run, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--config", type=Path, help="a config.json instead of the preset")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--final-learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0, help="steps; 0: at the end only")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(options, Path(folder))
        left = options.minutes * 60 - (time.perf_counter() - start)
        print(f"{run.settings.steps} steps, {left:.0f} s left for them", file=sys.stderr)
        finished = None
        for event in train(run, load(run.path)):
            if isinstance(event, Validation):
                elapsed = time.perf_counter() - start
                print(f"{elapsed:5.0f} s  step {event.step}: {event.bits_per_byte:.4f}", file=sys.stderr)
            if isinstance(event, Finished):
                finished = event
        seconds = time.perf_counter() - start
        best = best_bits_per_byte(run)
    rows = [
        ("parameters", f"{run.config.parameter_count():,}"),
        ("validation", f"{best:.4f} bits per byte"),
        ("time", f"{seconds:.0f} s in all, {finished.seconds:.0f} s of steps"),
        ("speed", f"{finished.tokens_per_second:,.0f} tokens/s"),
        ("peak memory", f"{peak_memory() / 1e6:.0f} MB"),
    ]
    report(
        f"{options.text.name} in {options.minutes:g} minutes",
        rows,
        {
            "benchmark": "small_text",
            "bits_per_byte": round(best, 4),
            "seconds": round(seconds, 1),
            "parameters": run.config.parameter_count(),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        },
    )


def prepare(options: argparse.Namespace, folder: Path) -> Run:
    text = options.text.read_bytes()
    cut = text.index(b"\n", len(text) * 9 // 10) + 1
    (folder / "train.txt").write_bytes(text[:cut])
    (folder / "validation.txt").write_bytes(text[cut:])
    config = ModelConfig.load(options.config) if options.config else ModelConfig.preset(options.preset)
    settings = {
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "dropout": options.dropout,
        "final_learning_rate": options.final_learning_rate,
        "seed": options.seed,
        "eval_every": options.eval_every,
        "save_every": 0,
    }
    return start_run(
        folder / "run", [folder / "train.txt"], config, vocab_size=options.vocab_size,
        validation=[folder / "validation.txt"], minutes=options.minutes, settings=settings,
    )  # fmt: skip


def best_bits_per_byte(run: Run) -> float:
    """Of the best checkpoint, over the whole validation text."""
    from mlxlm.checkpoint import load_model

    data = TokenDataset.open(run.data, "validation")
    return evaluate(load_model(run.path)[0], data, run.settings.sequence_length).bits_per_byte


if __name__ == "__main__":
    main()
