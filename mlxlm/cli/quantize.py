"""`mlxlm quantize`: write a model with fewer bits per weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import (
    EXISTING_PATH,
    MODEL,
    PATH,
    SIZE,
    SectionedCommand,
    adapter_option,
    add_options,
    allow_sleep_option,
    field_option,
    given_values,
    json_option,
    offline_option,
    option,
)
from mlxlm.config.option import options_of
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.utils.formatting import group_layers_by_value, human_bytes

if TYPE_CHECKING:
    from mlxlm.quantize import QuantizationReport

_NUM_WORST_LAYERS = 5
_KINDS = {"max_size": SIZE, "calibration_text": EXISTING_PATH, "eval_text": EXISTING_PATH}
_setting_options = add_options(
    *(field_option(field, kind=_KINDS.get(name)) for name, field in options_of(QuantizationSettings).items())
)


@click.command(cls=SectionedCommand)
@click.argument("source", type=MODEL)
@offline_option
@option("Output", "--out", PATH, "New folder for the model.", required=True)
@_setting_options
@adapter_option()
@allow_sleep_option("Options")
@json_option
def quantize(source: str, out: Path, adapter: Path | None, as_json: bool, **options: Any) -> None:
    """Quantize SOURCE for mlxlm and mlx_lm, and report the loss of quality.

    SOURCE is a name of mlxlm models, a folder, a run (its best checkpoint), a hub id (owner/name), or a .gguf or
    llama2.c .bin file. The report, with the error of each layer, is also written to quantization.json and
    quantization.png.
    """
    from mlxlm.quantize import quantize as run_quantize

    with render.phases_progress() as progress:
        settings = QuantizationSettings(**given_values(options))
        report = run_quantize(source, out, settings, adapter=adapter, progress=progress)
    if as_json:
        render.emit_json(report.to_dict())
    else:
        print_report(report)
    render.warn(report.warnings)


def print_report(report: QuantizationReport) -> None:
    """Print the report."""
    size = f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight"
    render.result(f"{report.path}: {size}")
    render.print_table(list(_rows(report)), ("", "source", "quantized"))
    rows = [(name, report.bits[name], f"{report.errors[name]:.4f}") for name in report.worst_layers(_NUM_WORST_LAYERS)]
    if rows:
        render.print_table(rows, (f"largest errors of {report.error_of}", "bits", "relative"))
    render.print_checks(report.checks)
    for line in notes(report):
        render.result(line)


def _rows(report: QuantizationReport) -> Iterator[tuple[str, str, str]]:
    yield (
        "weights",
        human_bytes(report.source_bits_per_weight * report.parameters / 8),
        human_bytes(report.bits_per_weight * report.parameters / 8),
    )
    yield "bits per weight", f"{report.source_bits_per_weight:.2f}", f"{report.bits_per_weight:.2f}"
    metrics = report.metrics
    if metrics is None:
        return
    after = f"{metrics.bits_per_byte_after:.4f} ({metrics.bits_per_byte_change:+.4f})"
    yield "bits per byte", f"{metrics.bits_per_byte_before:.4f}", after
    yield "KL divergence, nats per token", "0", f"{metrics.kl:.5f}"
    yield "top-1 agreement", "100 %", f"{100 * metrics.top1_agreement:.1f} %"
    if metrics.speed_before and metrics.speed_after:
        yield "tokens per second", f"{metrics.speed_before:.0f}", f"{metrics.speed_after:.0f}"


def notes(report: QuantizationReport) -> Iterator[str]:
    """What differs from the requested settings, and which texts were used."""
    mixed = Counter(16 if chosen is None else chosen["bits"] for chosen in report.formats.values())
    if len(mixed) > 1:
        counted = (f"{n} {'matrix' if n == 1 else 'matrices'} in {bits} bits" for bits, n in sorted(mixed.items()))
        yield "bits: " + ", ".join(counted)
    for size, layers in group_layers_by_value(report.reduced_group_sizes).items():
        yield f"groups of {size}, because the requested size doesn't divide the width: {layers}"
    for width, layers in group_layers_by_value(report.skipped).items():
        yield f"left in 16 bits, because no group size divides a width of {width}: {layers}"
    if report.rounded_experts:
        count = sum(report.rounded_experts.values())
        yield f"rounded to nearest, because the calibration text has too few tokens for them: {count} experts' matrices"
    if report.calibration_text:
        yield f"calibrated on: {report.calibration_text}"
    if before := report.metrics_before_recovery:
        agreement = f"top-1 agreement {100 * before.top1_agreement:.1f} %"
        yield f"before recovery: KL {before.kl:.5f}, {agreement}, {before.bits_per_byte_after:.4f} bits per byte"
    if report.metrics:
        metrics = report.metrics
        windows = render.windows(metrics.context_length, metrics.stride)
        yield f"evaluated on: {metrics.text}, {metrics.tokens} tokens {windows}"
        if metrics.speed_note:
            yield f"speed: {metrics.speed_note}"
