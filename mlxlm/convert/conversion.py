"""Convert any checkpoint that mlxlm opens to another format, without quantization, and verify the result."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.lazy_tensor import dtype_sizes, with_read_progress
from mlxlm.checkpoint.open import open_decoder_checkpoint
from mlxlm.convert.metadata import Check
from mlxlm.convert.output_formats import GGUFWriter, writer_for
from mlxlm.convert.verify import Progress, verify
from mlxlm.utils.errors import ArgumentError, CheckpointError
from mlxlm.utils.files import check_not_exists


@dataclass(frozen=True)
class ConversionReport:
    """What was written.

    Attributes:
        source: Path or hub id that was converted.
        source_format: Its format.
        path: The output.
        format: Its format: "huggingface", "gguf" or "llama2.c".
        dtype: Dtypes of the weights, the most frequent one first; for a GGUF file its outtype.
        parameters: Number of parameters.
        bytes: Size of all written files.
        bits_per_weight: Average over all parameters.
        seconds: Duration, with verification.
        checks: What was compared with the source; empty if the output wasn't verified.
        warnings: What the user should know.
        notes: Deviations from the requested types that are intended.
    """

    source: str
    source_format: str
    path: str
    format: str
    dtype: str
    parameters: int
    bytes: int
    bits_per_weight: float
    seconds: float
    checks: list[Check]
    warnings: list[str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def convert(
    source: Path | str,
    out: Path | str,
    *,
    dtype: str | None = None,
    outtype: str | None = None,
    verify_output: bool = True,
    cross_check: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint to the format that the name `out` stands for.

    One tensor is in memory at a time. If anything fails, `out` is not created.

    Args:
        source: Whatever `open_checkpoint` opens.
        out: `NAME.gguf` for llama.cpp, `NAME.bin` for llama2.c, or a folder in the Hugging Face layout of the model's
            family.
        dtype: Dtype of a folder's weights, one of `DTYPES`. By default each tensor keeps its own; weights from
            quantized models and GGUF files get the 16-bit dtype of most of their values or scales, else float16.
        outtype: Type of a GGUF file's matrices, one of `OUTTYPES`. By default the type of most of the source's weights.
        verify_output: Read the output again and compare it with the source, see `verify`.
        cross_check: Also run the output with the other programs that read its format (transformers and mlx_lm, or
            llama.cpp), which must predict the same tokens. Takes seconds to start each; a program that isn't installed
            is reported as skipped.
        progress: Called as `progress(phase, done, total)`: bytes while writing, then the steps of each check.

    Raises:
        ArgumentError: An argument has no effect on this format.
        CheckpointError: `out` exists, only mlx_lm runs the architecture, the output can't represent a value, or the
            verification fails.
        ConfigError: Unknown types, or a name of another format.
        TokenizerError: The format needs a tokenizer that the source doesn't have.
    """
    started = time.monotonic()
    out = Path(out)
    writer_class = writer_for(out)
    writer_class.check_arguments(dtype, outtype)
    if cross_check and not verify_output:
        raise ArgumentError("`cross_check` would have no effect: the output is not verified")
    check_not_exists(out, CheckpointError, "another name for the output")
    checkpoint = open_decoder_checkpoint(source, "converted")
    writer = writer_class(checkpoint, out, dtype, outtype)
    tensors = writer.tensors
    if progress is not None:
        tensors = with_read_progress(tensors, partial(progress, "writing"))
    with writer.atomic_output() as folder:
        files = writer.write(folder, tensors)
        written = open_decoder_checkpoint(files.path)
        checks = []
        if verify_output:
            backends = writer.backends if cross_check else ()
            checks = verify(checkpoint, written, str(out), backends, progress, files.tokens_may_differ)
        size = sum(file.stat().st_size for file in folder.iterdir())
    sizes = dtype_sizes(written.tensors.values())
    parameters = sum(math.prod(tensor.shape) for tensor in writer.tensors.values())
    return ConversionReport(
        source=str(source),
        source_format=checkpoint.format,
        path=str(out),
        format=writer.format,
        dtype=writer.outtype if isinstance(writer, GGUFWriter) else ", ".join(name for name, _ in sizes.most_common()),
        parameters=parameters,
        bytes=size,
        bits_per_weight=8 * sizes.total() / parameters,
        seconds=time.monotonic() - started,
        checks=checks,
        warnings=[*files.warnings, *_backend_warnings(checks)],
        notes=files.notes,
    )


def _backend_warnings(checks: list[Check]) -> list[str]:
    """Warnings about other programs that can't run the output, or compute something else."""
    verbs = {"refused": "can't run this output", "differs": "computes something else"}
    return [f"{check.name} {verbs[check.result]}: {check.detail}" for check in checks if check.result in verbs]
