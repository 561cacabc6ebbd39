"""µP: does the best learning rate stay the same when the model, or the batch, grows?

    python benchmarks/mup.py coordinates --out coordinates.png
    python benchmarks/mup.py widths TEXT --out FOLDER [--widths 32 64 128 256] [--tokens 64000]
    python benchmarks/mup.py batches TEXT --out FOLDER [--batches 64 512 4096 32768] [--tokens 400000]

`coordinates` trains models of several widths for four steps at one learning rate, and shows by how much activations
have changed (Yang et al. 2022, appendix D.1): with µP, as much at every width. `widths` and `batches` train a grid of
learning rates, and print bits per byte of each with the best one marked; a folder that exists is continued.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.config import ModelConfig
from mlxlm.config.mup import PARAMETRIZATIONS
from mlxlm.data import Batch
from mlxlm.experiments.run_group import is_finished
from mlxlm.experiments.sweep import Sweep
from mlxlm.experiments.sweep_report import plot_sweep
from mlxlm.experiments.variant import Variant
from mlxlm.model import Decoder
from mlxlm.tokenizer import load
from mlxlm.train import Budget, TokenizerOptions, TrainSettings, train
from mlxlm.train.step import TrainStep
from mlxlm.utils.plots import label_axes, new_figure, save_figure

LENGTH, VOCAB_SIZE = 64, 512
RATES = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("coordinates", "widths", "batches"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        if name != "coordinates":
            command.add_argument("text", type=Path)
            command.add_argument("--rates", type=float, nargs="+", default=RATES)
            command.add_argument("--tokens", type=float, default=64e3 if name == "widths" else 400e3)
        if name == "batches":
            command.add_argument("--batches", type=int, nargs="+", default=[64, 512, 4096, 32768], help="in tokens")
            command.add_argument("--width", type=int, default=32)
        else:
            command.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    options = parser.parse_args()
    if options.command == "coordinates":
        coordinates(options.out, options.widths)
    elif options.command == "widths":
        grid = {f"{p} {w}": ({"parametrization": p}, w) for p in PARAMETRIZATIONS for w in options.widths}
        compare(options, grid)
    else:
        mup = {"parametrization": "mup", "max_seq_length": LENGTH}
        compare(options, {f"{n} tokens": (mup | {"batch_size": n // LENGTH}, options.width) for n in options.batches})


def model_of(width: int) -> ModelConfig:
    """A model of two layers with heads of 16."""
    return ModelConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=width // 16, intermediate_size=3 * width,
        vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip


def activation_changes(
    config: ModelConfig, parametrization: str, optimizer: str = "adamw", learning_rate: float = 2e-3, steps: int = 4
) -> dict[str, float]:
    """Return the root mean square of the change of activations in a few steps."""
    settings = TrainSettings(99, learning_rate, 4, 32, optimizer=optimizer, parametrization=parametrization)
    model = Decoder(config)
    model.init_weights(0, parametrization)
    step, rng = TrainStep(model, settings), np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (4, 33)).astype(np.int32)

    def activations() -> dict[str, np.ndarray]:
        inputs = mx.array(tokens[:, :-1])
        states = [residual if h is None else residual + h for residual, h in model.model.layer_states(inputs)]
        logits = mx.take_along_axis(model(inputs), mx.array(tokens[:, 1:, None]), axis=-1)
        found = {"embedding": states[0], "first layer": states[1], "last layer": states[-1], "target logits": logits}
        return {name: np.array(value) for name, value in found.items()}

    before = activations()
    for _ in range(steps):
        eval_arrays(step([Batch(tokens)], learning_rate), step.state)
    after = activations()
    return {name: float(np.sqrt(((after[name] - before[name]) ** 2).mean())) for name in before}


def slopes(changes: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the exponent of the width in each change: 0 if it doesn't depend on the width."""
    widths = np.log(list(changes))
    names = next(iter(changes.values()))
    return {name: float(np.polyfit(widths, np.log([c[name] for c in changes.values()]), 1)[0]) for name in names}


def coordinates(out: Path, widths: Sequence[int]) -> None:
    figure, result = new_figure(8, 4), {}
    for axes, parametrization in zip(figure.subplots(1, 2, sharey=True), PARAMETRIZATIONS, strict=True):
        changes = {width: activation_changes(model_of(width), parametrization) for width in widths}
        result[parametrization] = slopes(changes)
        for name in changes[widths[0]]:
            axes.loglog(widths, [changes[width][name] for width in widths], "o-", label=name)
        label_axes(axes, "hidden size", "change of activations in 4 steps", title=parametrization)
        axes.set_xticks(widths, widths)
        axes.minorticks_off()
    axes.legend(loc="center right")
    save_figure(figure, out)
    print(json.dumps({"benchmark": "mup coordinates", "slopes": result}))


def compare(options: argparse.Namespace, rows: dict[str, tuple[dict[str, object], int]]) -> None:
    """Train each row with each learning rate, and print the table."""
    if options.out.exists():
        sweep = Sweep.open(options.out)
    else:
        variants = []
        for name, (settings, width) in rows.items():
            config = model_of(width)
            sizes = ("hidden_size", "intermediate_size", "num_attention_heads")
            parts = {part: str(getattr(config, part)) for part in sizes}
            variants += [
                Variant(f"{name} {rate:g}", parts, {**settings, "learning_rate": rate}) for rate in options.rates
            ]
        sweep = Sweep.start(
            options.out, [options.text], model_of(64), variants, tokenizer=TokenizerOptions(vocab_size=VOCAB_SIZE),
            budget=Budget(tokens=options.tokens),
            settings={"batch_size": 8, "max_seq_length": LENGTH, "eval_every": 0, "eval_tokens": 16384},
        )  # fmt: skip
    for number, trial in enumerate(sweep.trials(), 1):
        run = sweep.open_run(trial)
        if not is_finished(run) and sweep.result(trial).state != "failed":
            print(f"{number}/{sweep.num_trials} {trial.variant.name}", file=sys.stderr)
            try:
                for _ in train(run, load(run.path), resume=True):
                    pass
            except Exception as error:  # it diverged, which is a result
                print(error, file=sys.stderr)
    scores = {r.name: r.bits_per_byte for r in sweep.results() if r.finished}
    plot_sweep(sweep.results(), options.out / sweep.PLOT_FILE)
    print(f"{'':20}" + "".join(f"{rate:>10g}" for rate in options.rates), file=sys.stderr)
    for name in rows:
        own = [scores.get(f"{name} {rate:g}", float("inf")) for rate in options.rates]
        cells = [f"{score:.3f}{'*' if score == min(own) else ' '}" for score in own]
        print(f"{name:20}" + "".join(f"{cell:>10}" for cell in cells), file=sys.stderr)
    print(json.dumps({"benchmark": f"mup {options.command}", "bits_per_byte": scores}))


if __name__ == "__main__":
    main()
