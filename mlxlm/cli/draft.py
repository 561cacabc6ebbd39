"""`mlxlm draft`: train a draft head for speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import (
    EXISTING_PATH,
    MODEL,
    PATH,
    SectionedCommand,
    add_options,
    allow_sleep_option,
    field_option,
    given_values,
    json_option,
    offline_option,
    option,
)
from mlxlm.config.option import options_of
from mlxlm.train.draft_settings import DraftSettings
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import check_not_exists
from mlxlm.utils.formatting import human_count

if TYPE_CHECKING:
    from mlxlm.train.draft_head import DraftReport


_files = partial(option, "Files")


@click.command(cls=SectionedCommand)
@click.argument("model", type=MODEL)
@_files("--text", EXISTING_PATH, "Text that resembles what MODEL will write. Repeatable.", required=True, multiple=True)
@_files("--out", PATH, "New folder for the draft head.", required=True)
@add_options(*(field_option(field) for field in options_of(DraftSettings).values()))
@offline_option
@allow_sleep_option("Options")
@json_option
def draft(model: str, text: tuple[Path, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Train a draft head: MODEL then writes the same text faster.

    The head is one layer that predicts MODEL's next tokens, and MODEL verifies several of them in one pass. It learns
    from what MODEL writes after pieces of the text; MODEL itself doesn't change. Use it with --draft-model FOLDER of
    mlxlm chat, generate and serve, which draft as many tokens as pay at the moment, or none.
    """
    from mlxlm.cli.generation_options import load_model
    from mlxlm.train.draft_head import train_draft_head

    settings = DraftSettings(**given_values(options))
    check_not_exists(out, CheckpointError, "another name for the output")  # before minutes of training
    lm = load_model(model)
    with render.phases_progress() as progress:
        head, report = train_draft_head(lm, text, settings, progress)
    head.save(out)
    if as_json:
        render.emit_json({"path": str(out), **asdict(report)})
        return
    render.result(f"{out}: a draft head of {human_count(report.parameters)} parameters")
    render.print_table(list(_rows(report)), ("", "held-out text"))


def _rows(report: DraftReport) -> Iterator[tuple[str, str]]:
    yield "loss", f"{report.losses[0]:.3f} before, {report.losses[-1]:.3f} after training"
    yield "tokens that it can draft", f"{report.coverage:.1%}"
    for ahead, accuracy in enumerate(report.accuracy, 1):
        yield f"right {ahead} token{'s' * (ahead > 1)} ahead", f"{accuracy:.1%}"
