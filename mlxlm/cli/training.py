"""Runs training and shows it, for all commands that train."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.text import Text

from mlxlm import train
from mlxlm.checkpoint.locations import checkpoint_step
from mlxlm.cli import render
from mlxlm.cli.render import spinner
from mlxlm.cli.restart import restart_after
from mlxlm.cli.run_options import runtime_arguments
from mlxlm.cli.stop_signals import StopRequest
from mlxlm.cli.training_metrics import TrainingMetrics, line_chart, metric_texts
from mlxlm.report import REPORT_FILE, read_run
from mlxlm.report.log_entries import entry_before_start, number
from mlxlm.tokenizer import load
from mlxlm.train import events
from mlxlm.utils.errors import DeviceError, TrainingError
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from mlxlm.experiments.run_group import RunGroup

_SECONDS_BETWEEN_LINES = 10.0  # if stderr is not a terminal
_FORECAST = ("seconds", "step_seconds", "memory")  # fields of the log's forecast


@contextmanager
def phase(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a phase of the preparation: a bar over `total` bytes, or a spinner; a line if stderr is not a terminal."""
    if total is None:
        if not sys.stderr.isatty():
            render.say(label)
        with spinner(label):
            yield lambda _n: None
    else:
        with render.bytes_progress(label, total) as advance:
            yield advance


def stop_on_signal() -> StopRequest:
    """A StopRequest that says what happens next."""
    return StopRequest(lambda name: render.say(f"\n{name}: finishing this step and saving (again to stop at once)"))


def run_training(
    run: train.Run,
    *,
    resume: bool = False,
    stop: StopRequest | None = None,
    arguments: Sequence[str] = (),
    **options: Any,
) -> events.Finished | events.Stopped:
    """Train a run and show its progress.

    Args:
        run: The run.
        resume: Whether the run may have checkpoints.
        stop: Tells the caller whether a stop was requested, which may come too late for this run.
        arguments: The command line of a process that continues this command if the device fails; () for none.
        options: Further arguments of `mlxlm.train.train`.

    Returns:
        The last event of the run.

    Raises:
        Restart: The device has failed.
    """
    print_forecast(run)
    ending: events.Finished | events.Stopped | None = None
    num_processes = options["process_group"].size if "process_group" in options else 1
    stop, micro_batches, progress = stop or stop_on_signal(), 1, False
    try:
        with stop.catch_signals(), _display(num_processes) as show:
            for event in train.train(run, load(run.path), resume=resume, should_stop=stop, **options):
                show(event)
                if isinstance(event, events.Started):
                    micro_batches = event.micro_batches
                elif isinstance(event, events.CheckpointSaved):
                    progress = True
                elif isinstance(event, events.Finished | events.Stopped):
                    ending = event
    except DeviceError as error:
        if not arguments or num_processes > 1 or stop.requested:
            raise
        step = max((checkpoint_step(checkpoint) for checkpoint in run.checkpoints()), default=0)
        values = {"step": step, "micro_batches": micro_batches, "batch_size": run.settings.batch_size}
        if restart := restart_after(error, arguments, **values, progress=progress):
            raise restart from error
        raise
    assert ending is not None  # every run ends with one of them
    return ending


def run_and_summarize(run: train.Run, **options: Any) -> None:
    """Train a run, print its result and its path, and exit if it was stopped. For the arguments see `run_training`."""
    stop = stop_on_signal()
    arguments = [*shlex.split(run.resume_command)[1:], *runtime_arguments()]
    ending = run_training(run, stop=stop, arguments=arguments, **options)
    print_summary(ending, run)
    render.result(str(run.path))
    if isinstance(ending, events.Stopped):
        raise click.exceptions.Exit(stop.exit_code)


def train_sweep(
    group: RunGroup,
    runs: Iterable[tuple[str, Callable[[], train.Run]]],
    total: int,
    time_left: Callable[[int], str] = lambda _number: "",
    **options: Any,
) -> tuple[list[str], int]:
    """Train runs one after another, until a stop is requested. Finished runs are skipped, others are resumed.

    Args:
        group: What the runs belong to.
        runs: (name, function that makes or opens the run) of each.
        total: The number of runs.
        time_left: Returns what to print after the number of a run, from 0.
        options: Further arguments of `run_training`.

    Returns:
        An error message for each run that failed, and the exit code of the command.
    """
    from mlxlm.experiments.run_group import is_finished

    errors, stop = [], stop_on_signal()
    resume_command = [*group.COMMAND.split(), "--resume", str(group.path)]
    arguments = [*resume_command[1:], *runtime_arguments()]
    for i, (name, make) in enumerate(runs):
        render.say(f"{name} ({i + 1} of {total}){time_left(i)}", style="bold")
        run = make()
        if is_finished(run) and (run.path / REPORT_FILE).is_file():
            render.say("already finished")
            continue
        ending = None
        try:
            ending = run_training(run, resume=True, stop=stop, arguments=arguments, **options)
        except TrainingError as error:  # the other runs are still of use
            errors.append(f"{name}: {error.message}")
            render.say(errors[-1], style="red")
        if isinstance(ending, events.Stopped):
            render.say(f"stopped after step {ending.step}, saved")
        if stop.requested and (i + 1 < total or not isinstance(ending, events.Finished)):
            render.say("Continue with:")
            render.say(shlex.join(resume_command))
            return errors, stop.exit_code
    return errors, 1 if errors else 0


def print_forecast(run: train.Run) -> None:
    """Print what the log has before the first step: limited text, model size, conversations, forecast."""
    from mlxlm.train.start import PREPARATION_FRACTION

    if entry := entry_before_start(run.log_file, "text_limited", ("bytes", "total_bytes")):
        render.say(
            f"about {human_bytes(entry['bytes'])} of {human_bytes(entry['total_bytes'])} of text are used: "
            f"preparing all of it would take more than {PREPARATION_FRACTION:.0%} of the time"
        )
    if entry := entry_before_start(run.log_file, "model_size_chosen", ("parameters", "tokens", "epochs")):
        epochs = f"{entry['epochs']:.1f} epochs"
        hint = "; more text would help: repeated text improves the model less after 4 epochs" * (entry["epochs"] > 4.5)
        render.say(
            f"model size chosen by {entry.get('law_name')}: {human_count(entry['parameters'])} "
            f"parameters, about {human_count(entry['tokens'])} tokens, {epochs}{hint}"
        )
    entry = entry_before_start(run.log_file, "conversations", ("conversations", "max_seq_length"))
    if entry and all(number(entry.get(name)) >= 0 for name in ("split", "cut")):
        render.say(_conversations(entry))
    entry = entry_before_start(run.log_file, "prompts", ("prompts", "held_out"))
    if entry and run.settings.grpo is not None:
        size = run.settings.grpo.num_generations
        render.say(
            f"{entry['prompts']:,} prompts to train on and {entry['held_out']:,} for validation; each step generates "
            f"{size} answers to each of {run.settings.rows_per_step // size} prompts"
        )
    entry = entry_before_start(run.log_file, "preferences", ("max_seq_length",))
    if entry and all(number(entry.get(name)) >= 0 for name in ("chosen", "rejected", "too_long", "same")):
        render.say(_preferences(entry))
    if entry := _forecast(run):
        render.say(
            f"predicted from three steps: {human_seconds(entry['seconds'])} with validation, and "
            f"{human_bytes(entry['memory'])} of MLX's arrays at the peak"
        )


def _forecast(run: train.Run) -> dict[str, Any] | None:
    """The forecast in the log, unless the run was extended since then."""
    extended = run.settings.rewarm_step is not None
    return None if extended else entry_before_start(run.log_file, "forecast", _FORECAST)


def _conversations(entry: dict[str, Any]) -> str:
    """How the conversations of a fine-tuning run fit its rows, and what would help."""
    row = f"a row of {entry['max_seq_length']} tokens"
    text = f"{entry['conversations']:,} conversations"
    tokens, learned = (entry.get(name) or 0 for name in ("tokens", "learned_tokens"))
    if number(tokens) > 0 and number(learned) >= 0:
        text += f" of {tokens:,} tokens, {learned:,} learned ({learned / tokens:.0%}) and {tokens - learned:,} masked"
    if not entry["split"] and not entry["cut"]:
        return f"{text}, each whole in {row}"
    text += f": {entry['split'] + entry['cut']:,} are longer than {row}"
    if entry["split"]:
        text += f"; {entry['split']:,} of them are split between turns"
    if entry["cut"]:
        text += f"; {entry['cut']:,} are split inside an answer or its question, which continues in the next row"
    text += "; each epoch has every answer to its end"
    if entry["cut"] and (length := entry.get("suggested_seq_length")) is not None:
        text += f" (try: --max-seq-length {length})"
    return text


def _preferences(entry: dict[str, Any]) -> str:
    """The preferences of a run, and which were left out."""
    kinds = ("desirable", "undesirable") if entry.get("loss") == "kto" else ("chosen", "rejected")
    text = f"{entry['chosen']:,} {kinds[0]} and {entry['rejected']:,} {kinds[1]} answers"
    if entry["same"]:
        text += f"; {entry['same']:,} rows are left out because both answers are the same"
    if entry["too_long"]:
        row = f"a row of {entry['max_seq_length']} tokens"
        text += f"; {entry['too_long']:,} are left out because they are longer than {row}"
        if (length := entry.get("suggested_seq_length")) is not None:
            text += f" (try: --max-seq-length {length})"
    return text


def print_summary(ending: events.Finished | events.Stopped, run: train.Run) -> None:
    """Print the loss curve, the result and how to continue, at the end of a run."""
    if isinstance(ending, events.Stopped):
        render.say(f"stopped after step {ending.step}, saved. Continue with:")
        render.say(run.resume_command)
        return
    if ending.tokens_per_second is None:
        render.say(f"{run.path} had already finished its {ending.step} steps; nothing was left to do")
        return
    if render.console.is_terminal:
        history = read_run(run.path)
        render.say(f"training: {history.loss_title}")
        points = [(history.x_at_step("tokens", step), value) for step, value in history.loss_points]
        for line in line_chart(points, width=min(72, render.console.width - 12)):
            render.say(line)
    if ending.best_loss is not None and run.settings.grpo is not None:
        render.say(f"best validation: mean reward {-ending.best_loss:.4f}; {human_seconds(ending.seconds)} of steps")
    elif ending.best_loss is not None:
        speed = f"{ending.tokens_per_second:,.0f} tokens/s, " if ending.tokens_per_second else ""
        unit = ", chosen answers" if run.settings.has_pairs else " nats per token,"
        render.say(
            f"best validation: {ending.best_loss:.4f}{unit} {ending.bits_per_byte:.4f} bits per byte; "
            f"{speed}{human_seconds(ending.seconds)} of steps"
        )
    if entry := _forecast(run):
        render.say(
            f"predicted {human_seconds(entry['step_seconds'])} of steps and {human_bytes(entry['memory'])}, "
            f"measured {human_seconds(ending.seconds)} and {human_bytes(ending.memory)}"
        )
    render.say(f"the {'loss' if run.settings.grpo is None else 'reward'} curve is in {Path(run.path, 'loss.png')}")


@contextmanager
def _display(num_processes: int) -> Iterator[Callable[[events.Event], None]]:
    """Yields `show(event)`: a live status in a terminal, elsewhere a line every ten seconds."""
    if not render.console.is_terminal:
        yield _print_lines()
        return
    from mlxlm.plan.machines import measure_matmul

    # A shorter measurement finds a lower speed. It draws random numbers, so it comes before the run sets its seed.
    metrics = TrainingMetrics(peak=measure_matmul(seconds=0.1) * 1e9 * num_processes)

    def view() -> Text:
        return Text("\n".join(metrics.lines(render.console.width - 1)), no_wrap=True, overflow="crop")

    with Live(get_renderable=view, console=render.console, refresh_per_second=4, transient=True):

        def show(event: events.Event) -> None:
            metrics.update(event)
            _print_event(event)

        yield show


def _print_lines() -> Callable[[events.Event], None]:
    """Returns `show(event)` for a file or a pipe."""
    metrics, last = TrainingMetrics(), -math.inf

    def show(event: events.Event) -> None:
        nonlocal last
        metrics.update(event)
        _print_event(event)
        is_due = time.monotonic() - last > _SECONDS_BETWEEN_LINES
        if isinstance(event, events.Step) and (is_due or event.step == event.steps):
            last = time.monotonic()
            render.say(f"step {event.step}/{event.steps} {'  '.join(metrics.metrics())}")

    return show


def _print_event(event: events.Event) -> None:
    """Print a line about an event other than a step."""
    at = f"step {event.step}: " if hasattr(event, "step") else ""
    if isinstance(event, events.Started) and event.step < event.steps:
        render.say(
            f"{human_count(event.parameters)} parameters, steps {event.step + 1} to {event.steps} "
            f"of {event.tokens_per_step:,} tokens, {_epochs(event)}"
        )
    elif isinstance(event, events.Validation) and "reward" in event.metrics:
        render.say(f"{at}validation: mean reward {event.metrics['reward']:.4f}{' (best)' if event.best else ''}")
    elif isinstance(event, events.Validation):
        load = "" if event.expert_load is None else f", busiest expert {event.expert_load:.2f} times the mean"
        tokens = f"perplexity {event.perplexity:.2f}, {event.bits_per_byte:.4f} bits per byte"
        in_tokens = ("nll_loss", "cross_entropy")
        metrics = metric_texts({name: value for name, value in event.metrics.items() if name not in in_tokens})
        if "nll_loss" in event.metrics:
            tokens = f"{', '.join(metrics)}; chosen answers: {tokens}"
        else:
            tokens = ", ".join(["nats per token", *metrics, tokens])
        render.say(f"{at}validation {event.loss:.4f} {tokens}{' (best)' if event.best else ''}{load}")
    elif isinstance(event, events.Sample):
        render.say(f"{at}{event.prompt}{event.text}", style="dim")
    elif isinstance(event, events.CheckpointNotSaved):
        render.say(f"{at}not saved: {event.reason}; training continues (try: {event.hint})", style="yellow")
    elif isinstance(event, events.Paused):
        render.say(f"{at}paused: {event.reason}", style="yellow")
    elif isinstance(event, events.Throttled):
        render.say(f"{at}training {event.duty_cycle:g}% of the time: {event.reason}", style="yellow")
    elif isinstance(event, events.Resumed):
        render.say(f"{at}continuing after {human_seconds(event.seconds)}")
    elif isinstance(event, events.TrainingWarning):
        render.say(f"warning: {event.message}", style="yellow")


def _epochs(event: events.Started) -> str:
    """How many epochs the run has, and how much text it drops beyond the ends of windows, which are below 1%."""
    text = ""
    if event.dropped_fraction >= 0.01:
        text += f"; each drops {event.dropped_fraction:.0%} of the text, which fits in no row"
    if event.padding >= 0.01:
        text += f"; {event.padding:.0%} of the rows is padding"
    if len(event.epochs_by_source) == 1:
        return f"{event.epochs:.1f} epochs of the training text{text}"
    return "epochs of " + ", ".join(f"{name} {n:.1f}" for name, n in event.epochs_by_source.items()) + text
