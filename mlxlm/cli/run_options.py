"""The options of a training run that are not its settings: where it is, --resume, --set, power and trackers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlxlm import train
from mlxlm.cli import render, training_options
from mlxlm.cli.options import (
    PATH,
    add_options,
    allow_sleep_option,
    flag,
    given_flags,
    is_given,
    option,
    reject_unused_options,
)
from mlxlm.config import ModelConfig
from mlxlm.config.overrides import apply_overrides, parse_overrides
from mlxlm.families import compatibility_warning, resolve_model_type
from mlxlm.train.throttle import PowerPolicy

_RESUME = "Continue this run; with a training length, to that length."
_MOVED_DATA = "With --resume: the new place of the run's prepared data."
run_options = add_options(
    option("Run", "--out", PATH, "New folder for the run."),
    option("Run", "--resume", PATH, _RESUME, metavar="RUN"),
    option("Run", "--data moved_data", PATH, _MOVED_DATA, metavar="FOLDER", advanced=True),
)


_LENGTHS = ("steps", "tokens", "epochs", "minutes", "hours")


def resumed_run(arguments: Iterable[Any], options: dict[str, Any]) -> train.Run | None:
    """Open the run of --resume, with its data at --data and its new length; None without --resume.

    Args:
        arguments: Values that exclude --resume.
        options: The options. Those that don't say where or how long exclude --resume too, because the run has its own.
            --resume, --data and --decay-steps are removed.
    """
    path, moved_data, decay_steps = (options.pop(name, None) for name in ("resume", "moved_data", "decay_steps"))
    if path is None:
        for name, value in (("data", moved_data), ("decay-steps", decay_steps)):
            if value is not None:
                raise click.UsageError(f"--{name} needs --resume RUN")
        return None
    if decay_steps is not None:
        refuse_with_resume(any(arguments), [name for name in options if name != "out"], path)
        require_arguments(f"mlxlm pretrain --resume {path} --decay-steps N --out RUN", {"--out": options["out"]})
        return train.start_decay_branch(options["out"], path, decay_steps)
    refuse_with_resume(any(arguments), [name for name in options if name not in _LENGTHS], path)
    run = train.Run.open(path)
    if moved_data is not None:
        run = run.with_data(moved_data)
    if any(options.get(name) is not None for name in _LENGTHS):
        before, run = run, train.extend_run(run, given_budget(options, steps=options["steps"]))
        if run.settings != before.settings:
            render.say(_new_schedule(run.settings))
    return run


def _new_schedule(settings: train.TrainSettings) -> str:
    """What happens to the learning rate of a run whose length has changed."""
    text = f"the learning rate follows the {settings.lr_schedule} schedule of the new length"
    if settings.rewarm_learning_rate is None:
        return text
    return f"{text}, from {settings.rewarm_learning_rate:.3g} within {settings.warmup + 1} steps"


def given_budget(options: Mapping[str, Any], **values: Any) -> train.Budget:
    """The Budget of --tokens, --epochs, --minutes and --hours, and of other `values`."""
    from mlxlm.train.budget import check_duration

    minutes, hours = options.get("minutes"), options.get("hours")
    reject_unused_options(options, (minutes is not None, ["hours"], "--minutes says how long"))
    check_duration(hours=hours)
    minutes = minutes if hours is None else 60 * hours
    values |= {"tokens": options.get("tokens"), "epochs": options.get("epochs"), "minutes": minutes}
    return train.Budget(start_time=command_start_time(), **values)


def refuse_with_resume(has_data: bool, options: Iterable[str], path: Path) -> None:
    """Raise UsageError if there is more on the command line than --resume."""
    if given := [*(["DATA"] if has_data else []), *given_flags(options)]:
        alone = f"{click.get_current_context().command_path} --resume {shlex.quote(str(path))}"
        problem = f"--resume continues {path} with its own data and settings: {_enumerated(given)} can't be given"
        raise click.UsageError(f"{problem} (try: {alone}; or another --out)")


def require_arguments(usage: str, arguments: Mapping[str, object]) -> None:
    """Raise UsageError with the names of the arguments that have no value.

    Args:
        usage: What would work.
        arguments: Values by name: "DATA", "--out".
    """
    if missing := [name for name, value in arguments.items() if not value]:
        verb = "is" if len(missing) == 1 else "are"
        raise click.UsageError(f"{_enumerated(missing)} {verb} missing (try: {usage})")


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def sweep_options(section: str) -> Callable[..., Any]:
    """Return a decorator that adds `--out` and `--resume` to a command that trains many runs."""
    return add_options(
        option(section, "--out", PATH, "New folder for the runs."),
        option(section, "--resume", PATH, "Continue the runs in this folder.", metavar="FOLDER"),
    )


def sweep_folder(data: Collection[str], options: dict[str, Any]) -> Path:
    """The folder of --resume or --out, which are removed from `options`. --resume excludes DATA and the others."""
    out, resume = options.pop("out"), options.pop("resume")
    if resume is None:
        usage = f"{click.get_current_context().command_path} DATA --out FOLDER, or --resume FOLDER"
        require_arguments(usage, {"DATA": data, "--out": out})
        assert isinstance(out, Path)  # for type checkers
        return out
    refuse_with_resume(bool(data), ["out", *options], resume)
    assert isinstance(resume, Path)
    return resume


_SET = "Set a part of the architecture, such as positions=alibi, norm=layer or feed_forward=geglu. Repeatable."
override_option = option("Model", "--set overrides", str, _SET, multiple=True, metavar="NAME=VALUE")


def with_overrides(
    config: ModelConfig, overrides: Sequence[str], reserved: Mapping[str, str], context_length: int | None = None
) -> ModelConfig:
    """Apply `--set` to a configuration, and warn if other programs can't open such a model.

    Args:
        config: The configuration to change.
        overrides: NAME=VALUE texts.
        reserved: Fields that another option of the command sets, and the name of that option.
        context_length: Tokens that the model will see, if that is known; some parts depend on it.

    Raises:
        ConfigError: If an override is unknown or can't work.
    """
    if overrides and context_length is not None:
        config = config.with_changes(max_position_embeddings=context_length)
    config = resolve_model_type(apply_overrides(config, parse_overrides(overrides), reserved))
    if overrides and (warning := compatibility_warning(config)):
        render.say(warning, style="yellow")
    return config


def model_and_settings(options: Mapping[str, Any], has_time_limit: bool) -> tuple[ModelConfig | None, dict[str, Any]]:
    """The model to train, None if --init or the time limit chooses it, and the settings on the command line.

    Raises:
        ConfigError: If `--set` is unknown or can't work.
        click.UsageError: If it would have no effect.
    """
    settings = training_options.given_settings(options)
    if options.get("init") is not None:
        return None, settings
    if has_time_limit and not options["preset"] and not options["config"]:
        reason = "the model size is picked for the time; give --preset to change a part"
        reject_unused_options(options, (True, ["overrides"], reason))
        return None, settings
    config = training_options.chosen_config(options)
    names = {"vocab_size": "--vocab-size", "max_position_embeddings": "--max-seq-length"}
    length = settings.get("max_seq_length", training_options.default_max_seq_length(config))
    if not has_time_limit:  # which fits the length to the time
        settings["max_seq_length"] = length
    return with_overrides(config, options["overrides"], training_options.FLAGS | names, length), settings


_ACTIONS = ["pause", "slow", "ignore"]
_BATTERY = "On battery power: pause, train half of the time (slow), or ignore it."
_HEAT = "While heat slows the machine down: pause, train half of the time (slow), or ignore it."
_DUTY_CYCLE = "Train this percentage of the time, and rest between steps."
_MICRO_BATCHES = "Compute the gradients of a batch in N parts, one after another, to save memory."
_POWER, _TRACKERS = ("on_battery", "on_heat", "duty_cycle"), ("tensorboard", "wandb")
RUNTIME_OPTIONS = (*_POWER, *_TRACKERS, "micro_batches")  # names of the options of `runtime_options`

# These don't change the result (but for rounding), so they aren't settings of the run and may be given with --resume.
runtime_options = add_options(
    option("Power", "--on-battery", _ACTIONS, _BATTERY, default="ignore", advanced=True),
    option("Power", "--on-heat", _ACTIONS, _HEAT, default="ignore", advanced=True),
    option(
        "Power", "--duty-cycle", click.FloatRange(1, 100), _DUTY_CYCLE, default=100, metavar="PERCENT", advanced=True
    ),
    allow_sleep_option("Power"),
    option("Memory", "--micro-batches", click.IntRange(1), _MICRO_BATCHES, advanced=True),
    option("Logging", "--tensorboard", bool, "Also write TensorBoard event files to RUN/tensorboard.", advanced=True),
    option("Logging", "--wandb", str, "Also log to this Weights & Biases project.", metavar="PROJECT", advanced=True),
)


def pop_runtime_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the runtime options from `options`, and return them as arguments of `mlxlm.train.train`.

    Raises:
        PlatformError: If the library of a tracker is missing.
    """
    power = PowerPolicy(**{name: options.pop(name) for name in _POWER})
    trackers = {name: options.pop(name) for name in _TRACKERS}
    train.check_trackers(**trackers)
    return {"power": power, **trackers, "micro_batches": options.pop("micro_batches")}


def runtime_arguments() -> list[str]:
    """The options on the command line for a process that continues this command, except for --micro-batches."""
    context = click.get_current_context()
    arguments = ["--debug"] if context.find_root().meta.get("mlxlm.debug") else []
    others = ("allow_sleep", "as_json", "predict", "compute_budget", "reward")
    for name in filter(is_given, (*_POWER, *_TRACKERS, *others)):
        value = context.params.get(name, True)
        arguments += [flag(name)] if value is True else [flag(name), str(value)]
    return arguments


def command_start_time() -> float:
    """When this process started, on the monotonic clock: a time limit counts from here."""
    return click.get_current_context().meta["mlxlm.start_time"]
