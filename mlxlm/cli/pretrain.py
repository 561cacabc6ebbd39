"""`mlxlm pretrain`: train a model from scratch, or continue a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mlxlm.cli import render
from mlxlm.cli.machine_options import machine_options, pop_machine_options
from mlxlm.cli.overrides import override_option, with_overrides
from mlxlm.cli.run_options import (
    DEFAULT_MAX_SEQ_LENGTH,
    FLAGS,
    check_data_needs_resume,
    check_resume_alone,
    data_options,
    given_options,
    given_settings,
    moved_data_option,
    open_resumed_run,
    print_skipped,
    reject_unused_options,
    setting_options,
    unused_data_rules,
)


@click.command()
@click.argument("data", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="The run's new folder.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Continue this run, as it began.")
@click.option("--repeat", type=click.Path(path_type=Path), metavar="RUN", help="Repeat this run in --out, as logged.")
@moved_data_option
@click.option("--preset", default=None, help="Model size, see mlxlm presets.  [default: 1m, or by the time]")
@click.option("--config", type=click.Path(path_type=Path), help="A config.json instead of a preset.")
@override_option
@data_options()
@click.option("--steps", type=int, help="How long to train, in steps,")
@click.option("--tokens", type=float, help="in tokens (such as 2e7; default: 20 per parameter),")
@click.option("--hours", type=float, help="in hours from now on until all is done, without --preset the best size too,")
@click.option("--minutes", type=float, help="or in minutes of the same.")
@click.option("--scaling-law", type=click.Path(path_type=Path), metavar="FOLDER", help="Choose by mlxlm scaling's law.")
@setting_options()
@machine_options
@click.option("--hosts", metavar="A,B,...", help="Train on these machines, this one first; or MLX's hostfile of them.")
@click.option("--num-processes", type=click.IntRange(2), help="Train in this many processes on this machine.")
def pretrain(data, out, resume, repeat, moved_data, hosts, num_processes, **options: Any) -> None:
    """Train a model from scratch on DATA: text, .jsonl, .parquet and .arrow files, folders, - for stdin, or prepared
    shards.

    `--hours 2` is all it needs: a tokenizer, a model and a batch are chosen for the text and this machine, and the
    run ends when the time is over. The length of such a run follows the clock, so that another one has other weights;
    --repeat trains the same ones again.

    With DATA of the form PATH=WEIGHT, that share of the tokens is drawn from each.

    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    """
    start_time = click.get_current_context().meta["mlxlm.start_time"]
    if hosts is not None or num_processes is not None:
        raise click.exceptions.Exit(_launched(hosts, num_processes))
    from mlxlm.cli.rank_process import join_ranks
    from mlxlm.cli.training import StopRequest
    from mlxlm.train import run_worker

    with join_ranks() as here:
        if here.is_main_process:
            _lead(here, data, out, resume, repeat, moved_data, options, start_time)
        else:
            with StopRequest(quiet=True).catch_signals() as stop:
                run_worker(here, stop)


def _launched(hosts: str | None, num_processes: int | None) -> int:
    """Start this command on all hosts; returns the exit code."""
    from mlxlm.cli.launch import launch, make_hostfile, strip_options

    if hosts is not None and num_processes is not None:
        raise click.UsageError(
            "--num-processes would have no effect: --hosts says what to start, localhost,localhost too"
        )
    return launch(make_hostfile(hosts, num_processes), strip_options(sys.argv[1:], ("--hosts", "--num-processes")))


def _lead(
    process_group,
    data: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    repeat: Path | None,
    moved_data: Path | None,
    options: dict[str, Any],
    start_time: float,
) -> None:
    from mlxlm.cli.training import print_summary, run_training
    from mlxlm.tokenizer import load
    from mlxlm.train import Run, repeat_run

    going = pop_machine_options(options)
    if resume is None:
        check_data_needs_resume(moved_data)
    if resume is not None:
        check_resume_alone(data, out, repeat, options=options)
        run = open_resumed_run(resume, moved_data)
    elif repeat is not None:
        if out is None or data or given_options(options):
            raise click.UsageError("--repeat takes --out RUN, and the data and settings of the run that it repeats")
        run = repeat_run(out, Run.open(repeat))
    else:
        run = _new_run(data, out, options, process_group.size, going["power"].duty_cycle, start_time)
    ending = run_training(run, load(run.path), resume=resume is not None, process_group=process_group, **going)
    print_summary(ending, run)
    render.result(str(run.path))


def _new_run(
    data: tuple[str, ...],
    out: Path | None,
    options: dict[str, Any],
    num_processes: int,
    duty_cycle: float,
    start_time: float,
):
    from mlxlm.cli.training import phase
    from mlxlm.data import Manifest, parse_weighted_sources
    from mlxlm.families import load_config, load_preset
    from mlxlm.train import start_run
    from mlxlm.train.start import check_duration

    if not data or out is None:
        raise click.UsageError("give DATA and --out RUN, or --resume RUN")
    data, weights = parse_weighted_sources(data)
    _reject_unused_options(options, data)
    if num_processes > 1 and "-" in data:
        raise click.UsageError("several processes can't read stdin: give DATA as files")
    check_duration(hours=options["hours"])
    minutes = options["minutes"] if options["hours"] is None else 60 * options["hours"]
    settings, config = given_settings(options), None
    if not _chooses(options):
        file, preset = options["config"], options["preset"] or "1m"
        config = load_config(file) if file else load_preset(preset)
        reserved = {**FLAGS, "vocab_size": "--vocab-size", "max_position_embeddings": "--max-seq-length"}
        length = settings.get("max_seq_length", min(DEFAULT_MAX_SEQ_LENGTH, config.max_position_embeddings))
        if minutes is None:  # else the time decides, too
            settings["max_seq_length"] = length
        config = with_overrides(config, options["overrides"], reserved, length)
    given = {name: options[name] for name in ("validation_fraction", "on_bad_input") if options[name] is not None}
    run = start_run(
        out,
        data,
        config,
        weights=weights,
        text_column=options["text_column"],
        tokenizer=options["tokenizer"],
        tokenizer_type=options["tokenizer_type"] or "byte-level",
        vocab_size=options["vocab_size"],
        validation=options["validation"],
        minutes=minutes,
        duty_cycle=duty_cycle,
        start_time=start_time,
        scaling_law=_law(options["scaling_law"]),
        tokens=options["tokens"],
        settings=settings,
        num_processes=num_processes,
        stdin=sys.stdin.buffer,
        phase=phase,
        **given,
    )
    print_skipped(Manifest.read(run.data).skipped)
    return run


def _chooses(options: dict[str, Any]) -> bool:
    """Whether the model is chosen by the time there is."""
    timed = options["minutes"] is not None or options["hours"] is not None
    return timed and not options["preset"] and not options["config"]


def _law(folder: Path | None):
    from mlxlm.experiments.scaling_analysis import read_law

    return None if folder is None else read_law(folder)


def _reject_unused_options(options: dict[str, Any], data: tuple[str, ...]) -> None:
    """Raise a UsageError for an option that would have no effect beside the others."""
    reject_unused_options(
        {**options, "set": options["overrides"]},
        (options["preset"] and options["config"], ["preset"], "--config chooses the model"),
        (options["minutes"] is not None, ["hours"], "--minutes says how long"),
        (
            not _chooses(options),
            ["scaling_law"],
            "the model's size is chosen only where --hours is given and no --preset",
        ),
        (_chooses(options), ["set"], "the model is chosen; give --preset to vary one"),
        *unused_data_rules(options, data),
    )
