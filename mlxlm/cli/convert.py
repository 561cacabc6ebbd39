"""`mlxlm convert`: write a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.options import (
    EXISTING_PATH,
    MODEL,
    SectionedCommand,
    adapter_option,
    json_option,
    offline_option,
)
from mlxlm.utils.errors import one_line
from mlxlm.utils.formatting import human_bytes, human_count

_QUANTIZED = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "mxfp4", "q3_k_m", "q2_k")
_WITH_IMPORTANCE = tuple(name for name in _QUANTIZED if name not in ("q8_0", "mxfp4"))
# The types of GGUF files.
_OUTTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", **{name: name.upper() for name in _QUANTIZED}}
_DTYPE = (
    "Dtype of the weights: float32, float16 or bfloat16; in a .gguf file that of the matrices, also "
    f"{', '.join(_QUANTIZED)}.  [default: SOURCE's]"
)
_CALIBRATION_TEXT = (
    "Text to measure importance weights on, as for llama.cpp's importance matrix; ideally like what the model will "
    "read. For quantized .gguf files."
)


@click.command(cls=SectionedCommand)
@click.argument("source", type=MODEL)
@offline_option
@click.option("--out", required=True, help="New folder, NAME.gguf or NAME.bin.")
@click.option("--dtype", type=click.Choice(list(_OUTTYPES), case_sensitive=False), metavar="DTYPE", help=_DTYPE)
@click.option("--calibration-text", type=EXISTING_PATH, metavar="PATH", help=_CALIBRATION_TEXT)
@adapter_option()
@click.option("--no-verify", is_flag=True, help="Don't compare the output with SOURCE.")
@json_option
def convert(
    source: str,
    out: str,
    *,
    dtype: str | None,
    calibration_text: Path | None,
    adapter: Path | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Convert SOURCE to another format, and verify the result.

    SOURCE is a name of mlxlm models, a folder, a run (its best checkpoint), a hub id (owner/name), or a .gguf or
    llama2.c .bin file. --out chooses the format: NAME.gguf for llama.cpp, NAME.bin for llama2.c (Llama 2 models and
    SentencePiece tokenizers only), else a folder for mlxlm, mlx_lm and transformers. In a folder, quantized weights
    stay quantized, for mlxlm and mlx_lm, unless you give --dtype. Use mlxlm quantize to change their bits.
    """
    from mlxlm.convert.conversion import convert as run_convert

    if not source or not out:
        raise click.UsageError("SOURCE and --out need a name")
    if out.lower().endswith((".gguf/", ".bin/")):
        raise click.UsageError(f"{out} would be a file (try: without the / at its end, or another name for a folder)")
    is_gguf = out.lower().endswith(".gguf")
    if dtype in _QUANTIZED and not is_gguf:
        raise click.UsageError(f"--dtype {dtype} needs --out NAME.gguf (try: mlxlm quantize)")
    if calibration_text is not None and dtype not in _WITH_IMPORTANCE:
        choices = ", ".join(_WITH_IMPORTANCE)
        raise click.UsageError(f"--calibration-text would have no effect (try: --dtype {choices})")
    with render.phases_progress() as progress:
        importance = None
        if calibration_text is not None:
            from mlxlm.quantize import importance_weights

            importance = importance_weights(source, calibration_text, adapter=adapter, progress=progress)
        report = run_convert(
            source,
            out,
            dtype=None if is_gguf else dtype,
            outtype=_OUTTYPES.get(dtype or "") if is_gguf else None,
            adapter=adapter,
            importance=importance,
            verify_output=not no_verify,
            progress=progress,
        )
    if as_json:
        render.emit_json(report.to_dict())
        return
    size = f"{human_bytes(report.bytes)}, {human_count(report.parameters)} parameters"
    bits = f"{report.bits_per_weight:.2f} bits each ({report.dtype}), in {report.seconds:.1f} s"
    render.result(one_line(f"{report.path}: {size} at {bits}"))
    render.print_checks(report.checks)
    for note in report.notes:
        render.result(one_line(note))
    render.warn(report.warnings)
