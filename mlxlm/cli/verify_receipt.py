"""`mlxlm verify-receipt`: train the bundled model again, and compare."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.cli.options import PATH, SectionedCommand, allow_sleep_option, option
from mlxlm.utils.errors import MlxlmError

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.train import Step


@click.command("verify-receipt", cls=SectionedCommand)
@click.argument("model", default="small-world")
@option("Training", "--steps", click.IntRange(1, 200), "Compare the losses of the first N steps.", default=10)
@option("Training", "--all", bool, "Train to the end, and compare the weights and the quantized model, too.")
@option("Training", "--out", PATH, "Keep corpus and run in this new folder.  [default: a temporary one]")
@allow_sleep_option("Training")
def verify_receipt(model: str, steps: int, out: Path | None, **flags: bool) -> None:
    """Train the bundled MODEL again from its receipt.json, and compare.

    The receipt has the digests of the corpus, the tokens and the weights, the settings, and the losses of the first
    steps. On the same kind of machine with the same version of MLX all of them are equal, to the bit. On another one
    sums are rounded differently: losses are close if they differ by at most 0.001 nats up to step 20 and by 0.1 after
    it, and weights if their bits per byte differ by at most 25%. If anything is different, the exit code is 1.
    """
    from mlxlm.checkpoint.download import resolve
    from mlxlm.cli.training import phase, run_training, stop_on_signal
    from mlxlm.experiments.receipt import FILE_NAME, Receipt, environment
    from mlxlm.train import Stopped

    receipt = Receipt.read(resolve(model) / FILE_NAME)
    there, here = receipt.results["environment"], environment()
    others = [f"{name} {value}, there {there.get(name)}" for name, value in here.items() if there.get(name) != value]
    if others:
        render.say(f"Another kind of machine or another version: {'; '.join(others)}", style="yellow")
    with tempfile.TemporaryDirectory() as temporary:
        run = receipt.recipe.start(out or Path(temporary), phase)
        stop = stop_on_signal()

        def stop_after(step: Step, _lm: LoadedModel) -> None:
            if step.step >= steps and not flags["all"]:
                stop.requested = True

        ending = run_training(run, stop=stop, on_step=stop_after)
        if isinstance(ending, Stopped) and (flags["all"] or ending.step < steps):
            raise click.exceptions.Exit(stop.exit_code)
        different = []
        for comparison in receipt.compare(run):
            render.result(f"{comparison.name}: {comparison.result}, {comparison.detail}")
            different += [comparison.name] if comparison.result == "different" else []
    if different:
        raise MlxlmError(f"different from the receipt: {', '.join(different)}")
