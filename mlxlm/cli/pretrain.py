"""`mlxlm pretrain`: train a model from scratch, or continue a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import SectionedCommand, given_flags, option
from mlxlm.cli.run_options import (
    check_data_needs_resume,
    command_start_time,
    open_resumed_run,
    override_option,
    pop_runtime_options,
    run_options,
    runtime_options,
    with_overrides,
)
from mlxlm.cli.training_options import (
    DEFAULT_MAX_SEQ_LENGTH,
    FLAGS,
    data_options,
    data_settings,
    given_settings,
    given_tokenizer,
    print_skipped,
    reject_unused_settings,
    setting_options,
    unused_data_rules,
)

if TYPE_CHECKING:
    from mlxlm.train import ProcessGroup, Run

_RUN = ("out", "resume", "repeat", "moved_data")


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@run_options
@option(
    "Run",
    "--repeat",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Train the same weights as RUN again, in --out, by its log.",
)
@option("Model", "--preset", help="Model size; see mlxlm presets.  [default: 1m, or chosen for the time limit]")
@option("Model", "--config", type=click.Path(path_type=Path), help="Use this config.json instead of a preset.")
@override_option
@option("Training length", "--steps", type=int, help="Number of optimizer steps.")
@option("Training length", "--tokens", type=float, help="Number of tokens, such as 2e7.  [default: 20 per parameter]")
@option(
    "Training length",
    "--hours",
    type=float,
    help="Wall-clock budget; also picks the model size unless --preset or --config is given.",
)
@option("Training length", "--minutes", type=float, help="The same in minutes.")
@option(
    "Training length",
    "--scaling-law",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Pick the model size by the law that mlxlm scaling fitted in FOLDER.",
)
@data_options()
@setting_options()
@runtime_options
@option(
    "Distributed",
    "--hosts",
    metavar="A,B,...",
    help="Train on these machines, this one first; or an MLX hostfile.",
)
@option("Distributed", "--num-processes", type=click.IntRange(2), help="Train in N processes on this machine.")
def pretrain(data: tuple[str, ...], hosts: str | None, num_processes: int | None, **options: Any) -> None:
    """Train a model from scratch on DATA.

    DATA is text files, .jsonl, .parquet or .arrow files, folders, - for stdin, or prepared shards. With PATH=WEIGHT,
    training draws that share of its tokens from PATH.

    `--hours 2` is enough: it picks the tokenizer, model and batch for your text and machine, and ends on time. The
    number of steps then depends on the clock, so another such run has other weights; --repeat trains the same ones.

    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    """
    if hosts is not None or num_processes is not None:
        raise click.exceptions.Exit(_launch(hosts, num_processes))
    from mlxlm.cli.rank_process import join_ranks
    from mlxlm.cli.stop_signals import StopRequest
    from mlxlm.train import run_worker

    with join_ranks() as process_group:
        if process_group.is_main_process:
            _train(process_group, data, options)
        else:
            with StopRequest().catch_signals() as stop:
                run_worker(process_group, stop)


def _launch(hosts: str | None, num_processes: int | None) -> int:
    """Run this command on all hosts; returns the exit code."""
    from mlxlm.cli.launch import launch, strip_options

    if hosts is not None and num_processes is not None:
        raise click.UsageError(
            "--num-processes would have no effect: --hosts says what to start, localhost,localhost too"
        )
    return launch(hosts, num_processes, strip_options(sys.argv[1:], ("--hosts", "--num-processes")))


def _train(process_group: ProcessGroup, data: tuple[str, ...], options: dict[str, Any]) -> None:
    from mlxlm.cli.training import print_summary, run_training
    from mlxlm.tokenizer import load
    from mlxlm.train import Run, repeat_run

    runtime = pop_runtime_options(options)
    out, resume, repeat, moved_data = (options.pop(name) for name in _RUN)
    if resume is not None:
        run = open_resumed_run(resume, moved_data, (data, out, repeat), options)
    else:
        check_data_needs_resume(moved_data)
        if repeat is not None:
            if out is None or data or given_flags(options):
                raise click.UsageError("--repeat takes --out RUN, and the data and settings of the run that it repeats")
            run = repeat_run(out, Run.open(repeat))
        else:
            run = _new_run(data, out, options, process_group.size, runtime["power"].duty_cycle)
    ending = run_training(run, load(run.path), resume=resume is not None, process_group=process_group, **runtime)
    print_summary(ending, run)
    render.result(str(run.path))


def _new_run(
    data: tuple[str, ...], out: Path | None, options: dict[str, Any], num_processes: int, duty_cycle: float
) -> Run:
    from mlxlm.cli.training import phase
    from mlxlm.data import DataOptions, Manifest, parse_weighted_sources
    from mlxlm.families import load_config, load_preset
    from mlxlm.train import Budget, start_run
    from mlxlm.train.budget import check_duration

    if not data or out is None:
        raise click.UsageError("give DATA and --out RUN, or --resume RUN")
    data, weights = parse_weighted_sources(data)
    _reject_unused_options(options, data)
    if num_processes > 1 and "-" in data:
        raise click.UsageError("several processes can't read stdin: give DATA as files")
    check_duration(hours=options["hours"])
    minutes = options["minutes"] if options["hours"] is None else 60 * options["hours"]
    settings, config = given_settings(options), None
    if not _picks_size(options):
        file, preset = options["config"], options["preset"] or "1m"
        config = load_config(file) if file else load_preset(preset)
        reserved = {**FLAGS, "vocab_size": "--vocab-size", "max_position_embeddings": "--max-seq-length"}
        length = settings.get("max_seq_length", min(DEFAULT_MAX_SEQ_LENGTH, config.max_position_embeddings))
        if minutes is None:  # a time limit fits the length to the time
            settings["max_seq_length"] = length
        config = with_overrides(config, options["overrides"], reserved, length)
    run = start_run(
        out,
        DataOptions(data, weights, stdin=sys.stdin.buffer, **data_settings(options)),
        config,
        tokenizer=given_tokenizer(options),
        budget=Budget(
            tokens=options["tokens"],
            minutes=minutes,
            duty_cycle=duty_cycle,
            start_time=command_start_time(),
            num_processes=num_processes,
            scaling_law=_read_law(options["scaling_law"]),
        ),
        settings=settings,
        phase=phase,
    )
    print_skipped(Manifest.read(run.data).skipped)
    return run


def _picks_size(options: dict[str, Any]) -> bool:
    """Whether the model size is picked for the time limit."""
    has_time_limit = options["minutes"] is not None or options["hours"] is not None
    return has_time_limit and not options["preset"] and not options["config"]


def _read_law(folder: Path | None):
    from mlxlm.experiments.scaling_analysis import read_law

    return None if folder is None else read_law(folder)


def _reject_unused_options(options: dict[str, Any], data: tuple[str, ...]) -> None:
    reject_unused_settings(
        options,
        (options["preset"] and options["config"], ["preset"], "--config chooses the model"),
        (options["minutes"] is not None, ["hours"], "--minutes says how long"),
        (not _picks_size(options), ["scaling_law"], "the model size is picked only with --hours and without --preset"),
        (_picks_size(options), ["overrides"], "the model size is picked for the time; give --preset to change a part"),
        *unused_data_rules(options, data),
    )
