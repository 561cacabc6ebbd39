"""How a training run is shown and stopped, for all commands that train."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from mlxlm.chat.terminal.output import printable
from mlxlm.cli import render
from mlxlm.cli.chart import line_chart
from mlxlm.cli.spinner import spinner
from mlxlm.cli.stop_signals import STOP_SIGNALS, on_stop_signal
from mlxlm.cli.training_metrics import TrainingMetrics
from mlxlm.plan.machines import measure_matmul
from mlxlm.report import read_run
from mlxlm.report.log_entries import entry_before_start, number
from mlxlm.train import (
    CheckpointNotSaved,
    Event,
    Finished,
    Paused,
    Resumed,
    Run,
    Sample,
    Started,
    Step,
    Stopped,
    Throttled,
    TrainingWarning,
    Validation,
    train,
)
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

_PLAIN_EVERY = 10.0  # seconds between progress lines where stderr is not a terminal


@contextmanager
def phase(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A phase of the preparation: a bar over bytes, or a spinner; a line of it where stderr is not a terminal."""
    if total is None:
        if not sys.stderr.isatty():
            render.say(label)
        with spinner(label):
            yield lambda _n: None
    else:
        with render.bytes_progress(label, total) as advance:
            yield advance


class StopRequest:
    """The first Ctrl-C or SIGTERM, or the end of the terminal, asks the loop to finish its step; a second Ctrl-C or
    SIGTERM interrupts. The end of a terminal is told more than once: by the shell, the system, a session manager."""

    def __init__(self, quiet: bool = False) -> None:
        self.requested, self._quiet = False, quiet

    def __call__(self) -> bool:
        return self.requested

    @contextmanager
    def catch_signals(self) -> Iterator[StopRequest]:
        with on_stop_signal(self._on_signal):
            yield self

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.requested and number == signal.SIGHUP:
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if not self._quiet:
            render.say(
                f"\n{STOP_SIGNALS[signal.Signals(number)]}: finishing this step and saving (again to stop at once)"
            )


def run_training(
    run: Run, tokenizer, resume: bool = False, stop: StopRequest | None = None, **options: Any
) -> Finished | Stopped:
    """Train and show it; `options` are those of `mlxlm.train.train`. Returns how it ended; `stop` knows whether a stop
    was asked for, which may have been too late for this run."""
    print_forecast(run)
    ending: Finished | Stopped | None = None
    ranks = options["process_group"].size if "process_group" in options else 1
    with (stop or StopRequest()).catch_signals() as stop, _shown(ranks) as show:
        for event in train(run, tokenizer, resume=resume, should_stop=stop, **options):
            show(event)
            if isinstance(event, Finished | Stopped):
                ending = event
    return ending


def print_forecast(run: Run) -> None:
    """Which model was chosen, and what a probe said of the run, a line each; nothing where there was none."""
    if found := entry_before_start(run.log_file, "model_size_chosen", ("parameters", "tokens", "epochs")):
        passes = f"{found['epochs']:.1f} passes over the text"
        more = "; after 4 passes the same text teaches less and less: more of it would help" * (found["epochs"] > 4.5)
        render.say(
            f"chosen by {printable(str(found.get('law_name')))}: {human_count(found['parameters'])} parameters, about "
            f"{human_count(found['tokens'])} tokens, {passes}{more}"
        )
    found = entry_before_start(run.log_file, "conversations", ("conversations", "max_seq_length"))
    if found and all(number(found.get(name)) >= 0 for name in ("split", "cut")):
        render.say(_learned(found))
    if found := entry_before_start(run.log_file, "forecast", _FORECAST):
        render.say(
            f"predicted from three steps: {human_seconds(found['seconds'])} with validation, and "
            f"{human_bytes(found['memory'])} of memory at the peak"
        )


def _learned(found: dict[str, Any]) -> str:
    """How the conversations of a tuning run fit its rows, and what would help."""
    row = f"a row of {found['max_seq_length']} tokens"
    told = f"{found['conversations']:,} conversations"
    if not found["split"] and not found["cut"]:
        return f"{told}, each whole in {row}"
    told += f": {found['split'] + found['cut']:,} are longer than {row}"
    if found["split"]:
        told += f"; {found['split']:,} of them are split between turns"
    if found["cut"]:
        told += f"; {found['cut']:,} are cut inside of an answer or its question, which goes on in the next row"
    told += "; each pass has every answer to its end"
    if found["cut"] and (suggested_seq_length := found.get("suggested_seq_length")) is not None:
        told += f" (try: --max-seq-length {printable(str(suggested_seq_length))})"
    return told


_FORECAST = ("seconds", "step_seconds", "memory")


def print_summary(ending: Finished | Stopped, run: Run) -> None:
    """The last lines of a run: the curve, the result, and what to do next."""
    if isinstance(ending, Stopped):
        render.say(f"stopped after step {ending.step}, saved. Continue with:")
        render.say(run.resume_command)
        return
    if ending.tokens_per_second is None:
        render.say(f"{run.path} had finished its {ending.step} steps already; nothing was left to do")
        return
    if render.console.is_terminal:
        steps = read_run(run.path).steps
        render.say("training loss (nats per token)")
        points = list(zip(steps["tokens"], steps["loss"], strict=True))
        for line in line_chart(points, width=min(72, render.console.width - 12)):
            render.say(line)
    if ending.best_loss is not None:
        render.say(
            f"best validation: {ending.best_loss:.4f} nats per token, {ending.bits_per_byte:.4f} bits per byte; "
            + (f"{ending.tokens_per_second:,.0f} tokens/s, " if ending.tokens_per_second else "")
            + f"{human_seconds(ending.seconds)} of steps"
        )
    if found := entry_before_start(run.log_file, "forecast", _FORECAST):
        render.say(
            f"predicted were {human_seconds(found['step_seconds'])} of steps and {human_bytes(found['memory'])}, "
            f"measured {human_seconds(ending.seconds)} and {human_bytes(ending.memory)}"
        )
    render.say(f"the curve is in {Path(run.path, 'loss.png')}")


@contextmanager
def _shown(ranks: int) -> Iterator[Callable[[Event], None]]:
    """Yields `show(event)`: live lines in a terminal, as wide as it is at the moment; elsewhere a line every ten
    seconds. What should stay is said in both."""
    if not render.console.is_terminal:
        yield _Plain().show
        return
    # What fewer seconds find is lower. The products are of random numbers: before the run sets its seed.
    figures = TrainingMetrics(peak=measure_matmul(seconds=0.1) * 1e9 * ranks)

    def view() -> Text:
        return Text("\n".join(figures.lines(render.console.width - 1)), no_wrap=True, overflow="crop")

    with Live(get_renderable=view, console=render.console, refresh_per_second=4, transient=True):

        def show(event: Event) -> None:
            figures.update(event)
            _tell(event)

        yield show


class _Plain:
    """Lines for a file or a pipe."""

    def __init__(self) -> None:
        self._figures, self._last = TrainingMetrics(), -math.inf

    def show(self, event: Event) -> None:
        self._figures.update(event)
        _tell(event)
        if isinstance(event, Step) and (time.monotonic() - self._last > _PLAIN_EVERY or event.step == event.steps):
            self._last = time.monotonic()
            render.say(f"step {event.step}/{event.steps} {'  '.join(self._figures.metrics())}")


def _tell(event: Event) -> None:
    """A line about what is worth one."""
    at = f"step {event.step}: " if hasattr(event, "step") else ""
    if isinstance(event, Started) and event.step < event.steps:
        render.say(
            f"{human_count(event.parameters)} parameters, steps {event.step + 1} to {event.steps} "
            f"of {event.tokens_per_step:,} tokens, {_passes(event)}"
        )
    elif isinstance(event, Validation):
        render.say(
            f"{at}validation {event.loss:.4f} nats per token, perplexity "
            f"{event.perplexity:.2f}, {event.bits_per_byte:.4f} bits per byte{' (best)' if event.best else ''}"
        )
    elif isinstance(event, Sample):
        render.say(f"{at}{printable(event.prompt + event.text)}", style="dim")
    elif isinstance(event, CheckpointNotSaved):
        render.say(f"{at}not saved: {event.reason}; training goes on (try: {event.hint})", style="yellow")
    elif isinstance(event, Paused):
        render.say(f"{at}paused: {event.reason}", style="yellow")
    elif isinstance(event, Throttled):
        render.say(f"{at}working {event.duty_cycle:g}% of the time: {event.reason}", style="yellow")
    elif isinstance(event, Resumed):
        render.say(f"{at}going on after {human_seconds(event.seconds)}, as before")
    elif isinstance(event, TrainingWarning):
        render.say(f"warning: {event.message}", style="yellow")


def _passes(event: Started) -> str:
    """How often the text is seen, and how much of it isn't: more than the ends of windows, which are below 1%."""
    more = (
        f"; each leaves out {event.dropped_fraction:.0%}, which fits into no row"
        if event.dropped_fraction >= 0.01
        else ""
    )
    more += f"; {event.padding:.0%} of the rows is padding" if event.padding >= 0.01 else ""
    if len(event.epochs_by_source) == 1:
        return f"{event.epochs:.1f} passes over the training text{more}"
    return "passes over " + ", ".join(f"{name} {n:.1f}" for name, n in event.epochs_by_source.items()) + more
