"""`mlxlm quantize`: write a model with fewer bits per weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.model_options import MODEL, offline_option
from mlxlm.cli.options import (
    EXISTING_PATH,
    PATH,
    SIZE,
    SectionedCommand,
    allow_sleep_option,
    argument_errors_as_usage,
    json_option,
    option,
)
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.quantize import QuantizationReport

# Repeated here so that `--help` doesn't import MLX; a test compares them with those of mlxlm.quantize.
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
METHODS = ("rtn", "gptq", "awq")
_NUM_WORST_LAYERS = 5
_GROUP_SIZE = "Weights that share a scale. Smaller groups are more precise and larger.  [default: 64]"
_MODE = (
    "Number format. affine has a scale and bias per group; the others are floating point, with fixed bits and groups."
)
_METHOD = (
    "rtn rounds to nearest, in seconds. gptq takes about 5 minutes per 100M parameters on two CPU cores, and is closer "
    "to SOURCE at equal size. awq takes two thirds of that time; its result is mostly between the two."
)
_CALIBRATION_TEXT = (
    "Text for gptq, awq and the choice of bits, ideally like what the model will read.  [default: a run's training "
    "data, else built in]"
)
_EVAL_TEXT = (
    "Text to evaluate on, its first 4096 tokens.  [default: a run's validation data, a part of --calibration-text, "
    "else built in]"
)


_bits = partial(option, "Bits")
_method = partial(option, "Method")
_output = partial(option, "Output")


@click.command(cls=SectionedCommand)
@click.argument("source", type=MODEL)
@offline_option
@_output("--out", PATH, "New folder for the model.", required=True)
@_bits("--bits", ["2", "3", "4", "5", "6", "8"], "Bits of all matrices.  [default: 4]")
@_bits("--group-size", ["32", "64", "128"], _GROUP_SIZE)
@_bits("--mode", MODES, _MODE, default="affine")
@_bits("--recipe", RECIPES, "Mixed bits by a fixed rule, as in mlx_lm.")
@_bits("--max-size", SIZE, "Choose bits per matrix so that the files have at most this size: 2.0GB.", metavar="SIZE")
@_bits("--target-bpw", float, "Choose bits per matrix for this average of bits per weight: 4.5.")
@_bits("--max-kl", float, "Choose bits per matrix for at most this KL divergence, in nats per token: 0.02.")
@_method("--method", METHODS, _METHOD, default="rtn")
@_method("--calibration-text", EXISTING_PATH, _CALIBRATION_TEXT)
@_output("--eval-text", EXISTING_PATH, _EVAL_TEXT)
@_output("--no-evaluate", bool, "Don't compare the result with SOURCE.")
@_output("--no-verify", bool, "Don't read the files again to check them.")
@_output("--cross-check", bool, "Also run the output with mlx_lm, and compare its tokens.")
@allow_sleep_option("Options")
@json_option
def quantize(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Quantize SOURCE for mlxlm and mlx_lm, and show what that costs.

    SOURCE is a name of mlxlm models, a folder, a run (its best checkpoint), a hub id (owner/name), or a .gguf or
    llama2.c .bin file. The report, with the error of each layer, is also written to quantization.json and
    quantization.png.
    """
    from mlxlm.quantize import QuantizationSettings
    from mlxlm.quantize import quantize as run_quantize

    for name in ("bits", "group_size"):
        options[name] = options[name] and int(options[name])
    for name in ("verify", "evaluate"):
        options[name] = not options.pop(f"no_{name}")
    with argument_errors_as_usage(), render.phases_progress() as progress:
        report = run_quantize(source, out, QuantizationSettings(**options), progress=progress)
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
    from mlxlm.utils.formatting import group_layers_by_value

    mixed = Counter(16 if chosen is None else chosen["bits"] for chosen in report.formats.values())
    if len(mixed) > 1:
        counted = (f"{n} {'matrix' if n == 1 else 'matrices'} in {bits} bits" for bits, n in sorted(mixed.items()))
        yield "bits: " + ", ".join(counted)
    for size, layers in group_layers_by_value(report.reduced_group_sizes).items():
        yield f"groups of {size}, because the requested size doesn't divide the width: {layers}"
    for width, layers in group_layers_by_value(report.skipped).items():
        yield f"left in 16 bits, because no group size divides a width of {width}: {layers}"
    if report.calibration_text:
        yield f"calibrated on: {report.calibration_text}"
    if report.metrics:
        metrics = report.metrics
        windows = render.windows(metrics.context_length, metrics.stride)
        yield f"evaluated on: {metrics.text}, {metrics.tokens} tokens {windows}"
        if metrics.speed_note:
            yield f"speed: {metrics.speed_note}"
