"""`mlxlm pretrain`: train a model from scratch, or continue a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mlxlm import train
from mlxlm.cli import training_options
from mlxlm.cli.distributed import finish_before_sigterm, is_launched, launch_processes
from mlxlm.cli.options import MODEL, PATH, SectionedCommand, given_flags, offline_option, option
from mlxlm.cli.run_options import (
    given_budget,
    model_and_settings,
    override_option,
    pop_runtime_options,
    require_arguments,
    resumed_run,
    run_options,
    runtime_options,
)
from mlxlm.cli.stop_signals import StopRequest
from mlxlm.cli.training import phase, run_and_summarize
from mlxlm.data.options import DataOptions, parse_weighted_sources

_PRESET = "Model size; see mlxlm models presets.  [default: 1m, or chosen for the time limit]"
_INIT = "Start from this model and its tokenizer."
_REPEAT = "Repeat RUN in --out; it ends with the same weights."
_TOKENS = "Number of tokens, such as 2e7.  [default: 20 per parameter; with --init one epoch]"
_HOURS = "Time limit; also chooses the model size, unless --preset or --config is given."
_DECAY_STEPS = (
    "With --resume RUN or RUN/checkpoints/step-N: a new run in --out that ends there after decaying the learning rate."
)
_LAW = "Choose the model size by the scaling law that mlxlm scaling fitted in FOLDER."
_HOSTS = "Train on these machines, this one first; or an MLX hostfile."


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@offline_option
@run_options
@option("Run", "--repeat", PATH, _REPEAT, metavar="RUN", advanced=True)
@option("Model", "--init", MODEL, _INIT, metavar="MODEL")
@training_options.model_options("Model", _PRESET)
@override_option
@training_options.steps_option
@option("Training length", "--tokens", float, _TOKENS)
@option("Training length", "--hours", float, _HOURS)
@option("Training length", "--minutes", float, "The same in minutes.")
@option("Training length", "--decay-steps", click.IntRange(1), _DECAY_STEPS, advanced=True)
@option("Training length", "--scaling-law", PATH, _LAW, metavar="FOLDER", advanced=True)
@training_options.data_options()
@training_options.setting_options()
@training_options.quantize_bits_option
@runtime_options
@option("Distributed", "--hosts", str, _HOSTS, metavar="A,B,...", advanced=True)
@option("Distributed", "--num-processes", click.IntRange(2), "Train in N processes on this machine.", advanced=True)
def pretrain(data: tuple[str, ...], hosts: str | None, num_processes: int | None, **options: Any) -> None:
    """Train a model on DATA: a new one, or with --init an existing one.

    DATA is text files, .jsonl, .csv, .parquet or .arrow files, folders, - for stdin, or prepared shards. With
    PATH=WEIGHT, training draws that share of its tokens from PATH.

    With only --hours 2, mlxlm chooses the tokenizer, model and batch size for your text and machine, and ends on time.

    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    \f

    With a time limit, the number of steps depends on the clock, so another such run has other weights; --repeat trains
    the same ones.
    """  # noqa: D301 - click's form feed: --help ends there
    if num_processes is not None and hosts is not None:
        problem = "--num-processes would have no effect: --hosts lists all processes, also on one machine"
        raise click.UsageError(problem)

    if (processes := hosts or num_processes) and not is_launched():
        launch_processes(processes, sys.argv[1:])
    with train.join_process_group() as process_group, finish_before_sigterm(process_group.size):
        if process_group.rank == 0:
            _train(process_group, data, options)
        else:
            with StopRequest().catch_signals() as stop:
                train.run_worker(process_group, stop)


def _train(process_group: train.ProcessGroup, data: tuple[str, ...], options: dict[str, Any]) -> None:
    runtime = pop_runtime_options(options)
    run = resumed_run(data, options)
    out, repeat = options.pop("out"), options.pop("repeat")
    if run is None and repeat is not None:
        if out is None or data or given_flags(options):
            raise click.UsageError("--repeat takes --out RUN, and the data and settings of the run that it repeats")
        run = train.repeat_run(out, train.Run.open(repeat))
    if run is None:
        run = _new_run(data, out, options, process_group.size, runtime["power"].duty_cycle)
    run_and_summarize(run, resume=True, process_group=process_group, **runtime)


def _new_run(
    data: tuple[str, ...], out: Path | None, options: dict[str, Any], num_processes: int, duty_cycle: float
) -> train.Run:
    from mlxlm.experiments.scaling_analysis import read_law

    require_arguments("mlxlm pretrain DATA --out RUN, or --resume RUN", {"DATA": data, "--out": out})
    assert out is not None  # for type checkers
    sources, weights = parse_weighted_sources(data)
    has_time_limit = options["minutes"] is not None or options["hours"] is not None
    init = options["init"]
    picks_size = has_time_limit and not options["preset"] and not options["config"] and init is None
    training_options.reject_unused_settings(
        options,
        sources,
        (init, ["preset", "config", "overrides", "scaling_law"], "the model of --init has its own architecture"),
        (init, ["path", "vocab_size", "tokenizer_type"], "the model of --init has its own tokenizer"),
        (options["teacher"], ["vocab_size", "tokenizer_type"], "the model has the tokenizer of --teacher"),
        (not picks_size, ["scaling_law"], "the model size is picked only with --hours and without --preset"),
    )
    if num_processes > 1 and "-" in sources:
        raise click.UsageError("several processes can't read stdin: give DATA as files")
    config, settings = model_and_settings(options, has_time_limit)
    law = options["scaling_law"] and read_law(options["scaling_law"])
    budget = given_budget(options, duty_cycle=duty_cycle, num_processes=num_processes, scaling_law=law)
    text = DataOptions(sources, weights, stdin=sys.stdin.buffer, **training_options.data_settings(options))
    tokenizer = training_options.given_tokenizer(options)
    run = train.start_run(
        out, text, config, init=init, tokenizer=tokenizer, budget=budget, settings=settings, phase=phase
    )
    training_options.print_read(run.data)
    return run
