"""`mlxlm doctor`: show what MLX finds on this machine, or check that everything works on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlxlm.backend.blas import blas_warning
from mlxlm.cli import render
from mlxlm.cli.options import PATH, SectionedCommand, json_option, reject_unused_options
from mlxlm.utils.errors import CheckpointError, one_line
from mlxlm.utils.files import check_not_exists, unused_path
from mlxlm.utils.formatting import human_bytes


@click.command(cls=SectionedCommand)
@click.option("--full", is_flag=True, help="Check kernels, training and decoding, and write a report.")
@click.option("--out", type=PATH, help="New JSON file for the report of --full.  [default: mlxlm-doctor.json]")
@json_option
def doctor(full: bool, out: Path | None, as_json: bool) -> None:
    """Show the device, MLX, the BLAS and its measured speed, memory, and the folder of downloaded models.

    With --full, check that everything works on this machine, and measure its speed: each kernel against MLX's
    operations, a training run that is stopped and resumed, decoding with plain and quantized caches. This takes one
    or two minutes on a CPU, longer on a GPU. The report is a JSON file to attach to an issue. It contains no user
    names, host names or paths.
    """
    from mlxlm.doctor.facts import basic_facts

    reject_unused_options({"out": out}, (not full, ("out",), "there is no --full"))
    if full:
        _check(out, as_json)
        return
    facts = basic_facts()
    if as_json:
        render.emit_json(facts)
        return
    for name, value in facts.items():
        render.result(f"{name.replace('_', ' '):<24} {_format(name, value)}")
    for line in advice(facts):
        render.say(line, style="yellow")


def _check(out: Path | None, as_json: bool) -> None:
    """Run all checks, write the report, and exit with 1 if one failed."""
    from mlxlm.doctor import check_machine
    from mlxlm.doctor.report import summarize, summarize_metal_kernels

    if out is not None:
        check_not_exists(out, CheckpointError, "another --out")
    with render.phases_progress() as progress:
        report = check_machine(progress)
    out = out or unused_path(Path("mlxlm-doctor.json"))
    report.write(out)
    if as_json:
        render.emit_json(report.to_dict())
    else:
        render.print_table(summarize(report.results), ("part", "check", "result", "time", ""))
        if kernels := summarize_metal_kernels(report.results):
            render.print_table(kernels, ("Metal kernel", "checks that ran it", "failed", "largest relative error"))
    for result in report.failed:
        render.say(one_line(f"failed: {result.section}, {result.title}: {result.reason}"), style="red")
    render.say(f"{report.headline}; the report is in {out}")
    if report.failed:
        click.get_current_context().exit(1)


def advice(facts: dict[str, Any]) -> list[str]:
    """Return what would make training faster, one line each."""
    lines = []
    if facts["device"] == "CPU":
        if warning := blas_warning():
            lines.append(warning)
        if not facts["compiler"]:
            lines.append("no g++ found: compiled graphs are off, training is slower (try: apt-get install g++)")
    return lines


def _format(name: str, value: Any) -> str:
    if name in ("memory", "working_set"):
        return "unknown" if value is None else human_bytes(value)
    if name == "matmul_gflops":
        return f"{value} GFLOP/s (float32, 1024 x 1024)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
