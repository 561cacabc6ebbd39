"""Pretrain a model until it is good enough, with your own code between the steps.

    python examples/pretrain_until.py stories.txt --out run --preset 1m --bits-per-byte 1.5

Writes a text after each validation, and stops when the validation reaches --bits-per-byte. The same command continues
an interrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from threading import Event

import mlxlm
from mlxlm.families import load_preset
from mlxlm.generation import LoadedModel
from mlxlm.tokenizer import load
from mlxlm.train import Finished, Run, Step, Stopped, Validation, start_run, train


def main() -> None:
    """Train, print, and stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--bits-per-byte", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--eval-every", type=int, default=250)
    options = parser.parse_args()

    if options.out.exists():
        run = Run.open(options.out)
    else:
        settings = {"steps": options.steps, "eval_every": options.eval_every, "batch_size": 8, "max_seq_length": 256}
        run = start_run(options.out, options.text, load_preset(options.preset), settings=settings)

    good_enough = Event()

    def write_sample(step: Step, lm: LoadedModel) -> None:
        if step.step % options.eval_every == 0:
            print(mlxlm.generate(lm, "Once", max_tokens=40, temperature=0.8, seed=1).text)

    events = train(run, load(run.path), resume=True, should_stop=good_enough.is_set, on_step=write_sample)
    for event in events:
        match event:
            case Step() if event.step % 50 == 0:
                print(f"step {event.step}: loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s")
            case Validation():
                print(f"step {event.step}: {event.bits_per_byte:.3f} bits per byte")
                if event.bits_per_byte <= options.bits_per_byte:
                    good_enough.set()
            case Stopped() | Finished():
                print(f"done after {event.step} steps: mlxlm chat {run.path}")


if __name__ == "__main__":
    main()
