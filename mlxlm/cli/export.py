"""`mlxlm export`: a run as a self-contained model folder."""

from __future__ import annotations

import re
from pathlib import Path

import click

from mlxlm.cli import render


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new folder.")
@click.option("--bits", type=int, default=4, show_default=True, help="2, 3, 4, 5, 6, 8 or 16 (float16).")
@click.option(
    "--group-size", type=click.Choice(["32", "64", "128"]), default="64", show_default=True,
    help="Weights that share a scale; smaller is more precise and larger.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object on stdout.")
def export(source: Path, out: Path, bits: int, group_size: str, as_json: bool) -> None:
    """Write the best checkpoint of a run (or a model folder) for mlxlm, mlx_lm and, at 16 bits, transformers."""
    from mlxlm.export import export as run_export

    given = click.get_current_context().get_parameter_source("group_size") is click.core.ParameterSource.COMMANDLINE
    if bits == 16 and given:
        raise click.UsageError("--group-size would have no effect: 16 bits have no groups")
    with render.spinner(f"exporting {source} at {bits} bits"):
        report = run_export(source, out, bits, int(group_size))
    if as_json:
        render.emit_json(report.to_dict())
    else:
        for line in report_lines(report):
            render.result(line)


def report_lines(report) -> list[str]:
    """The report for people."""
    lines = [
        f"{report.path}: {render.human_bytes(report.bytes)}, "
        f"{render.human_count(report.parameters)} parameters at {report.bits_per_weight:.2f} bits each"
    ]
    if report.bits_per_byte_after is not None:
        change = report.bits_per_byte_after - report.bits_per_byte_before
        lines.append(
            f"validation: {report.bits_per_byte_after:.4f} bits per byte ({change:+.4f} by the smaller weights)"
        )
    for size, layers in _by_value(report.regrouped).items():
        lines.append(f"groups of {size} instead of {report.group_size}, which doesn't divide the width: {layers}")
    for width, layers in _by_value(report.skipped).items():
        lines.append(f"left in 16 bits, since no group size divides a width of {width}: {layers}")
    return lines


def _by_value(layers: dict[str, int]) -> dict[int, str]:
    """The layers of each value, with * for the numbers of equal ones."""
    found: dict[int, dict[str, None]] = {}
    for name, value in layers.items():
        found.setdefault(value, {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    return {value: ", ".join(names) for value, names in found.items()}
