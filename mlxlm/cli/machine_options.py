"""Options of a run that change nothing of its result: when it rests, and where else its events go.

They are no settings of the run: given beside --resume, they hold from then on.
"""

from __future__ import annotations

from typing import Any

import click

_ANSWERS = click.Choice(["pause", "slow", "ignore"])

_OPTIONS = (
    click.option("--on-battery", type=_ANSWERS, default="ignore", show_default=True,
                 help="On battery power: stand still, work half of the time, or go on."),
    click.option("--on-heat", type=_ANSWERS, default="ignore", show_default=True,
                 help="The same, while the machine is so hot that it slows down."),
    click.option("--duty-cycle", type=click.FloatRange(1, 100), default=100, show_default=True, metavar="PERCENT",
                 help="Work this share of the time, with rests between the steps."),
    click.option("--tensorboard", is_flag=True, help="Write event files into RUN/tensorboard, too."),
    click.option("--wandb", metavar="PROJECT", help="Send events to this project of Weights & Biases, too."),
)  # fmt: skip


_POWER, _TRACKERS = ("on_battery", "on_heat", "duty_cycle"), ("tensorboard", "wandb")
MACHINE_OPTIONS = (*_POWER, *_TRACKERS)  # their names


def machine_options(command):
    """Add them to a command that trains."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def pop_machine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take them out of a command's `options`: as arguments of `mlxlm.train.train`.

    Raises PlatformError where a library is missing: before the work that comes first.
    """
    from mlxlm.train import PowerPolicy, check_trackers

    power = PowerPolicy(**{name: options.pop(name) for name in _POWER})
    trackers = {name: options.pop(name) for name in _TRACKERS}
    check_trackers(**trackers)
    return {"power": power, **trackers}
