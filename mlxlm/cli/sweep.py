"""Several runs after each other, shown one by one; each that is interrupted is gone on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxlm.cli import render
from mlxlm.cli.training import StopRequest, run_training
from mlxlm.experiments.sweep import is_finished
from mlxlm.train import Finished, Run, Stopped
from mlxlm.utils.errors import TrainingError


def train_sweep(
    runs: Sequence[tuple[str, Callable[[], Run]]],
    tokenizer,
    command: str,
    left: Callable[[int], str] = lambda _number: "",
    **options: Any,
) -> list[str]:
    """Train what is unfinished of `runs`, (name, what makes or opens it) each, until a stop is asked for.

    command: goes on with the rest. left: what to say beside the number of a run, from 0. options: of
    `mlxlm.train.train`, for each of them. Returns what went wrong, a line for each run.
    """
    failed, stop = [], StopRequest()
    for number, (name, make) in enumerate(runs):
        render.say(f"{name} ({number + 1} of {len(runs)}){left(number)}", style="bold")
        run = make()
        if is_finished(run):
            render.say("finished before")
            continue
        ending = None
        try:
            ending = run_training(run, tokenizer, resume=True, stop=stop, **options)
        except TrainingError as error:  # of this run: the others still tell something
            failed.append(f"{name}: {error.message}")
            render.say(failed[-1], style="red")
        if isinstance(ending, Stopped):
            render.say(f"stopped after step {ending.step}, saved")
        if stop.requested:
            if number + 1 < len(runs) or not isinstance(ending, Finished):
                render.say("Continue with:")
                render.say(command)
            break
    return failed
