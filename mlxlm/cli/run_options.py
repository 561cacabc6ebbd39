"""The options of a training run that are not its settings: where it is, --resume, --set, power and trackers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import add_options, given_flags, option

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig
    from mlxlm.train import Run

run_options = add_options(
    option("Run", "--out", type=click.Path(path_type=Path), help="New folder for the run."),
    option("Run", "--resume", type=click.Path(path_type=Path), metavar="RUN", help="Continue this run."),
    option(
        "Run",
        "--data",
        "moved_data",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="With --resume: the new place of the run's prepared data.",
    ),
)


def open_resumed_run(path: Path, moved_data: Path | None, arguments: Iterable[Any], options: Iterable[str]) -> Run:
    """Open the run of --resume, with its data at `moved_data`.

    Args:
        path: The run's folder.
        moved_data: The folder of --data.
        arguments: Values that exclude --resume.
        options: Names of options that exclude --resume, because the run has its own settings.
    """
    from mlxlm.train import Run

    if any(arguments) or given_flags(options):
        raise click.UsageError("--resume uses the run's own data and settings: give nothing else")
    run = Run.open(path)
    return run if moved_data is None else run.with_data(moved_data)


def check_data_needs_resume(moved_data: Path | None) -> None:
    """Raise UsageError for --data without --resume."""
    if moved_data is not None:
        raise click.UsageError("--data needs --resume RUN: it says where that run's data was moved to")


override_option = option(
    "Model",
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a part of the architecture, such as positions=alibi, norm=layer or feed_forward=geglu. Repeatable.",
)


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
    from mlxlm.config.overrides import apply_overrides, parse_overrides
    from mlxlm.families import compatibility_warning, resolve_model_type

    if overrides and context_length is not None:
        config = config.with_changes(max_position_embeddings=context_length)
    config = resolve_model_type(apply_overrides(config, parse_overrides(overrides), reserved))
    if overrides and (warning := compatibility_warning(config)):
        render.say(warning, style="yellow")
    return config


_POWER_ACTIONS = click.Choice(["pause", "slow", "ignore"])
_POWER, _TRACKERS = ("on_battery", "on_heat", "duty_cycle"), ("tensorboard", "wandb")
RUNTIME_OPTIONS = (*_POWER, *_TRACKERS)  # names of the options of `runtime_options`

# These don't change the result, so they aren't settings of the run and may be given beside --resume.
runtime_options = add_options(
    option(
        "Power",
        "--on-battery",
        type=_POWER_ACTIONS,
        default="ignore",
        show_default=True,
        help="On battery power: pause, train half of the time (slow), or ignore it.",
    ),
    option(
        "Power",
        "--on-heat",
        type=_POWER_ACTIONS,
        default="ignore",
        show_default=True,
        help="While heat slows the machine down: pause, train half of the time (slow), or ignore it.",
    ),
    option(
        "Power",
        "--duty-cycle",
        type=click.FloatRange(1, 100),
        default=100,
        show_default=True,
        metavar="PERCENT",
        help="Train this percentage of the time, and rest between steps.",
    ),
    option("Logging", "--tensorboard", is_flag=True, help="Also write TensorBoard event files to RUN/tensorboard."),
    option("Logging", "--wandb", metavar="PROJECT", help="Also log to this Weights & Biases project."),
)


def pop_runtime_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the runtime options from `options`, and return them as arguments of `mlxlm.train.train`.

    Raises:
        PlatformError: If the library of a tracker is missing.
    """
    from mlxlm.train import PowerPolicy, check_trackers

    power = PowerPolicy(**{name: options.pop(name) for name in _POWER})
    trackers = {name: options.pop(name) for name in _TRACKERS}
    check_trackers(**trackers)
    return {"power": power, **trackers}


def command_start_time() -> float:
    """When this process started, on the monotonic clock: a time limit counts from here."""
    return click.get_current_context().meta["mlxlm.start_time"]
