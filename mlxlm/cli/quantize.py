"""`mlxlm quantize`: fewer bits per weight, and what they cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.quantize import QuantizationReport

# Repeated here so that `--help` needn't import MLX; a test compares them with mlxlm.quantize's.
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
METHODS = ("rtn", "gptq", "awq")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WORST = 5


class _Bytes(click.ParamType):
    """2.0GB, 900MB, 1.5GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", value.strip())
        unit = _UNITS.get(match[2].upper()) if match else None
        if unit is None or float(match[1]) * unit < 1:
            self.fail(f"{value!r} is not a size such as 2.0GB, 900MB or 1.5GiB", param, ctx)
        return int(float(match[1]) * unit)


@click.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The new folder.")
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), help="Of all matrices.  [default: 4]")
@click.option(
    "--group-size", type=click.Choice(["32", "64", "128"]),
    help="Weights that share a scale; smaller is more precise and larger.  [default: 64]",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(MODES), default="affine", show_default=True,
    help="affine has a scale and a bias per group; the others are floating-point, with bits and groups of their own.",
)  # fmt: skip
@click.option("--recipe", type=click.Choice(RECIPES), help="Mixed bits by a fixed rule, those of mlx_lm.")
@click.option("--max-size", type=_Bytes(), help="Choose bits per matrix so that the files take at most so much: 2.0GB.")
@click.option("--target-bpw", type=float, help="The same for a mean over all weights: 4.5.")
@click.option("--max-kl", type=float, help="The same for the KL divergence from SOURCE, in nats per token: 0.02.")
@click.option(
    "--method", type=click.Choice(METHODS), default="rtn", show_default=True,
    help="round takes seconds. gptq takes about 5 minutes per 100M parameters on two CPU cores, and at equal size the"
    " result is closer to SOURCE. awq takes two thirds of that and mostly comes out between the two.",
)  # fmt: skip
@click.option(
    "--calibration-text", type=click.Path(exists=True, path_type=Path),
    help="To calibrate gptq, awq and searches with, ideally like what the model will read.  [default: a run's training"
    " data, else built in]",
)  # fmt: skip
@click.option(
    "--eval-text", type=click.Path(exists=True, path_type=Path),
    help="To measure on, its first 8192 tokens.  [default: a run's validation data, a part of --calibration-text, else built in]",
)  # fmt: skip
@click.option("--no-verify", is_flag=True, help="Don't check what was written, nor ask mlx_lm to run it.")
@click.option("--no-evaluate", is_flag=True, help="Don't compare the result with SOURCE.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object on stdout.")
def quantize(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write SOURCE with fewer bits per weight, for mlxlm and mlx_lm, and show what that costs.

    SOURCE is a folder, a run (its best checkpoint), a hub id (owner/name), a .gguf or a llama2.c .bin file. The
    report, with the error of each layer, is also in the output: quantization.json and quantization.png.
    """
    settings = _settings(options)
    from mlxlm.quantize import quantize as run_quantize

    with render.phases_progress() as progress:
        report = run_quantize(source, out, **settings, progress=progress)
    if as_json:
        render.emit_json(report.to_dict())
    else:
        show(report)
    for warning in report.warnings:
        render.say(f"warning: {warning}", style="yellow")


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """The library's arguments. Options that would have no effect, or contradict each other, are wrong usage."""
    deciding = [n for n in ("bits", "recipe", "max_size", "target_bpw", "max_kl") if options[n] is not None]
    if len(deciding) > 1:
        raise click.UsageError(f"{_flag(deciding[0])} and {_flag(deciding[1])} both decide the bits: one of them")
    mode, method = options["mode"], options["method"]
    searches = any(options[name] is not None for name in ("max_size", "target_bpw", "max_kl"))
    if mode != "affine":
        given = next((n for n in (*deciding, "group_size") if options[n] is not None), None)
        if given:
            raise click.UsageError(f"{_flag(given)} would have no effect: {mode} has bits and groups of its own")
        if method == "gptq":
            raise click.UsageError(f"--method gptq is for --mode affine, not {mode}: awq is for both")
    if options["calibration_text"] and method == "rtn" and not searches:
        raise click.UsageError(
            "--calibration-text would have no effect on plain rounding: --method gptq, or --eval-text"
        )
    if options["no_evaluate"]:
        for name in ("eval_text", "max_kl"):
            if options[name] is not None:
                raise click.UsageError(f"--no-evaluate excludes {_flag(name)}")
    for name in ("target_bpw", "max_kl"):
        if options[name] is not None and not 0 < options[name] < float("inf"):
            raise click.UsageError(f"{_flag(name)} is a positive number")
    return {
        "verify": not options["no_verify"],
        "bits": options["bits"] and int(options["bits"]),
        "group_size": options["group_size"] and int(options["group_size"]),
        "mode": mode,
        "recipe": options["recipe"],
        "method": method,
        "calibration_text": options["calibration_text"],
        "eval_text": options["eval_text"],
        "max_size": options["max_size"],
        "target_bpw": options["target_bpw"],
        "max_kl": options["max_kl"],
        "evaluate": not options["no_evaluate"],
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def show(report: QuantizationReport) -> None:
    """The report for people, on stdout."""
    size = f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight"
    render.result(f"{report.path}: {size}")
    render.print_result(render.table(list(_rows(report)), ("", "source", "quantized")))
    worst_layers = [(name, report.bits[name], f"{report.errors[name]:.4f}") for name in report.worst_layers(_WORST)]
    if worst_layers:
        render.print_result(render.table(worst_layers, (f"largest errors of {report.error_of}", "bits", "relative")))
    for check in report.checks:
        render.result(f"{check.name}: {check.result}, {check.detail}")
    if not report.checks:
        render.result("not verified")
    for line in notes(report):
        render.result(line)


def _rows(report: QuantizationReport) -> Iterator[tuple[str, str, str]]:
    yield (
        "weights",
        human_bytes(report.source_bits_per_weight * report.parameters / 8),
        human_bytes(report.bits_per_weight * report.parameters / 8),
    )
    yield "bits per weight", f"{report.source_bits_per_weight:.2f}", f"{report.bits_per_weight:.2f}"
    said = report.metrics
    if said is None:
        return
    after = f"{said.bits_per_byte_after:.4f} ({said.bits_per_byte_change:+.4f})"
    yield "bits per byte", f"{said.bits_per_byte_before:.4f}", after
    yield "KL divergence, nats per token", "0", f"{said.kl:.5f}"
    yield "same most likely token", "100 %", f"{100 * said.top1_agreement:.1f} %"
    if said.speed_before and said.speed_after:
        yield "tokens per second", f"{said.speed_before:.0f}", f"{said.speed_after:.0f}"


def notes(report: QuantizationReport) -> Iterator[str]:
    """What differs from what was asked, and which texts were used."""
    from mlxlm.checkpoint.layer_names import group_by_value

    mixed = Counter(16 if chosen is None else chosen["bits"] for chosen in report.formats.values())
    if len(mixed) > 1:
        counted = (f"{n} {'matrix' if n == 1 else 'matrices'} in {bits} bits" for bits, n in sorted(mixed.items()))
        yield "bits: " + ", ".join(counted)
    for size, layers in group_by_value(report.reduced_group_sizes).items():
        yield f"groups of {size}, since the size asked for doesn't divide the width: {layers}"
    for width, layers in group_by_value(report.skipped).items():
        yield f"left in 16 bits, since no group size divides a width of {width}: {layers}"
    if report.calibration_text:
        yield f"calibrated on: {report.calibration_text}"
    if report.metrics:
        said = report.metrics
        yield f"measured on: {said.text}, {said.tokens} tokens {render.windows(said.context_length, said.stride)}"
        if said.speed_note:
            yield f"speed: {said.speed_note}"
