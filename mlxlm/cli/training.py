"""How a training run is shown and stopped; shared by `pretrain` and `quickstart`."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from mlxlm.cli import render
from mlxlm.cli.chart import line_chart
from mlxlm.cli.waiting import waiting
from mlxlm.train import Event, Finished, Run, Sample, Saved, Started, Step, Stopped, Validation, train
from mlxlm.units import human_bytes, human_count, human_seconds

_PLAIN_EVERY = 10.0  # seconds between progress lines where stderr is not a terminal


@contextmanager
def phase(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A phase of the preparation: a bar over bytes, or a spinner; a line of it where stderr is not a terminal."""
    if total is None:
        if not sys.stderr.isatty():
            render.say(label)
        with waiting(label):
            yield lambda _n: None
    else:
        with render.bytes_progress(label, total) as advance:
            yield advance


class StopRequest:
    """The first Ctrl-C or SIGTERM asks the loop to finish its step; a second one interrupts."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        render.say(f"\n{name}: finishing this step and saving (again to stop at once)")


def run_training(run: Run, tokenizer, resume: bool = False, **options: Any) -> Finished | Stopped:
    """Train and show it; `options` are those of `mlxlm.train.train`. Returns how it ended."""
    ending: Finished | Stopped | None = None
    with StopRequest().listening() as stop, _progress() as show:
        for event in train(run, tokenizer, resume=resume, should_stop=stop, **options):
            show(event)
            if isinstance(event, Finished | Stopped):
                ending = event
    return ending


def describe_end(ending: Finished | Stopped, run: Run) -> None:
    """The last lines of a run: the curve, the result, and what to do next."""
    if isinstance(ending, Stopped):
        render.say(f"stopped after step {ending.step}, saved. Continue with:")
        render.say(f"mlxlm pretrain --resume {shlex.quote(str(run.path))}")
        return
    if not ending.tokens_per_second:
        render.say(f"{run.path} had finished its {ending.step} steps already; nothing was left to do")
        return
    entries = run.read_log()
    validations = [(e["tokens"], e["loss"]) for e in entries if e["event"] == "validation"]
    steps = [(e["tokens"], e["loss"]) for e in entries if e["event"] == "step"]
    if render.console.is_terminal:
        render.say("training loss (nats per token)")
        for line in line_chart(steps, width=min(72, render.console.width - 12)):
            render.say(line)
    if validations:
        render.say(
            f"best validation: {ending.best_loss:.4f} nats per token, {ending.bits_per_byte:.4f} bits per byte; "
            f"{ending.tokens_per_second:,.0f} tokens/s, {human_seconds(ending.seconds)} of steps"
        )
    render.say(f"the curve is in {Path(run.path, 'loss.png')}")


@contextmanager
def _progress() -> Iterator[Callable[[Event], None]]:
    """Yields `show(event)`: a live line in a terminal, a line every ten seconds elsewhere."""
    live = render.console.is_terminal
    columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(16), TextColumn("{task.fields[facts]}")
    with Progress(*columns, console=render.console, disable=not live, transient=True) as bar:
        task = bar.add_task("", total=None, facts="compiling the first step")
        last = 0.0

        def show(event: Event) -> None:
            nonlocal last
            if isinstance(event, Started):
                bar.update(task, total=event.steps, completed=event.step)
                render.say(
                    f"{human_count(event.parameters)} parameters, steps {event.step + 1} to {event.steps} "
                    f"of {event.tokens_per_step:,} tokens, {_passes(event)}"
                )
            elif isinstance(event, Step):
                facts = _facts(event)
                bar.update(task, completed=event.step, facts=facts)
                if not live and (time.monotonic() - last > _PLAIN_EVERY or event.step == event.steps):
                    last = time.monotonic()
                    render.say(f"step {event.step}/{event.steps} {facts}")
            elif isinstance(event, Validation):
                render.say(
                    f"step {event.step}: validation {event.loss:.4f} nats per token, perplexity "
                    f"{event.perplexity:.2f}, {event.bits_per_byte:.4f} bits per byte{' (best)' if event.best else ''}"
                )
            elif isinstance(event, Sample):
                render.say(f"step {event.step}: {event.prompt}{event.text}", style="dim")
            elif isinstance(event, Saved) and live:
                bar.update(task, facts=f"saved {event.path.name}")

        yield show


def _passes(event: Started) -> str:
    """How often the text is seen, and how much of it isn't: more than the ends of windows, which are below 1%."""
    cropped = f"; each leaves out {event.cropped:.0%}, which fits into no row" if event.cropped >= 0.01 else ""
    if len(event.epochs_of) == 1:
        return f"{event.epochs:.1f} passes over the training text{cropped}"
    return "passes over " + ", ".join(f"{name} {n:.1f}" for name, n in event.epochs_of.items()) + cropped


def _facts(event: Step) -> str:
    speed = f"{event.tokens_per_second:,.0f} tokens/s" if event.tokens_per_second else "first step compiled"
    return (
        f"loss {event.loss:.3f}  {speed}  {human_seconds(event.seconds_left)} left  "
        f"{human_bytes(event.memory)}"
    )
