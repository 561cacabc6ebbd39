"""`mlxlm report`: write curves, samples and settings of training runs as an HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.options import SectionedCommand
from mlxlm.report import REPORT_FILE, read_run, write_report
from mlxlm.train.settings import TrainSettings


@click.command(cls=SectionedCommand)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--out", type=click.Path(path_type=Path), help="HTML file to write.  [default: RUN/report.html]")
@click.option("--open", "show", is_flag=True, help="Open the report in the browser.")
def report(runs: tuple[Path, ...], out: Path | None, show: bool) -> None:
    """Write a report of a RUN, or of several side by side, as an HTML file that works offline.

    A run writes its own report when it ends. You can also write it while a run is training.
    """
    if out is None:
        if len(runs) > 1:
            raise click.UsageError("several runs need --out FILE")
        out = runs[0] / REPORT_FILE
    write_report([read_run(run) for run in runs], out, TrainSettings.defaults)
    if show:
        webbrowser.open(out.absolute().as_uri())
    render.result(str(out))
