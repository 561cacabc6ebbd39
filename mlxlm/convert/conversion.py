"""Convert any checkpoint that mlxlm opens to another format, without quantization, and verify the result."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, huggingface, llama2c
from mlxlm.checkpoint.bits import fits_float16, max_abs
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.huggingface import check_tokenizer, copy_tokenizer
from mlxlm.checkpoint.lazy_tensor import UNQUANTIZED_DTYPES, LazyTensor, LazyTensors, dtype_sizes, with_read_progress
from mlxlm.checkpoint.locations import FOLDER_FORMATS
from mlxlm.checkpoint.open import open_decoder_checkpoint
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.convert.metadata import Check
from mlxlm.convert.verify import Progress, verify
from mlxlm.utils.errors import ArgumentError, CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_files, atomic_new_folder, check_not_exists
from mlxlm.utils.formatting import group_layers_by_value

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
OUTTYPES = gguf.OUTTYPES
_OUTTYPE_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Why a matrix of a GGUF file is of another type than the outtype.
_OTHER_TYPE_REASONS = {"Q8_0": "its errors are errors of the logits", "F16": "its rows are not a multiple of 32"}


@dataclass(frozen=True)
class WrittenFiles:
    """What a writer wrote.

    Attributes:
        path: What to open: a folder, or the file.
        warnings: What the user should know.
        notes: Deviations from the requested types that are intended.
        tokens_may_differ: Whether a warning says that the format's runtime tokenizes some texts differently.
    """

    path: Path
    warnings: list[str]
    notes: list[str]
    tokens_may_differ: bool = False


class Writer(ABC):
    """Writes one checkpoint in one format.

    Attributes:
        format: Name of the format, as in `Checkpoint.format` or "huggingface".
        backends: Other programs that read the format, names in `cross_check.REQUIRED_PACKAGES`.
        tensors: The tensors to write, not quantized, by the decoder's names.
    """

    format: ClassVar[str]
    backends: ClassVar[tuple[str, ...]] = ()
    dtype_ignored: ClassVar[str | None] = None  # why `dtype` has no effect
    outtype_ignored: ClassVar[str | None] = "it is for .gguf files"

    def __init__(self, checkpoint: Checkpoint, out: Path, dtype: str | None = None, outtype: str | None = None):
        self.checkpoint, self.out = checkpoint, out
        self.config = checkpoint.config.with_changes(quantization=None)
        self.tensors: LazyTensors = dequantized_tensors(checkpoint)

    @classmethod
    def check_arguments(cls, dtype: str | None, outtype: str | None) -> None:
        """Raise ConfigError for unknown types, ArgumentError for one that the format doesn't use."""
        for name, value, choices, ignored in (
            ("dtype", dtype, DTYPES, cls.dtype_ignored),
            ("outtype", outtype, OUTTYPES, cls.outtype_ignored),
        ):
            if value is not None and value not in choices:
                raise ConfigError(f"unknown {name} {value!r}", f"one of {', '.join(choices)}")
            if value is not None and ignored:
                raise ArgumentError(f"`{name}` would have no effect: {ignored}")

    def atomic_output(self) -> AbstractContextManager[Path]:
        """A context manager: a temporary folder whose files get their names at the end."""
        return atomic_new_files(self.out)

    @abstractmethod
    def write(self, folder: Path, tensors: LazyTensors) -> WrittenFiles:
        """Write `tensors`, which are `self.tensors` with progress, to the temporary `folder`."""


class HuggingFaceWriter(Writer):
    """A folder in the model family's own Hugging Face layout."""

    format = "huggingface"
    backends = ("transformers", "mlx_lm")

    def __init__(self, checkpoint: Checkpoint, out: Path, dtype: str | None = None, outtype: str | None = None):
        super().__init__(checkpoint, out)
        check_tokenizer(checkpoint)
        if dtype or checkpoint.config.quantization or checkpoint.format not in FOLDER_FORMATS:
            target = DTYPES[dtype or _main_dtype(checkpoint)]
            self.tensors = {name: _cast(name, tensor, target) for name, tensor in self.tensors.items()}

    def atomic_output(self) -> AbstractContextManager[Path]:
        """A context manager: a temporary folder that gets its name at the end."""
        return atomic_new_folder(self.out)

    def write(self, folder: Path, tensors: LazyTensors) -> WrittenFiles:
        """Write config.json, the weights and the tokenizer's files."""
        huggingface.write(folder, self.checkpoint.hf_config, self.config, tensors, None)
        return WrittenFiles(folder, copy_tokenizer(self.checkpoint, folder), [])


class GGUFWriter(Writer):
    """A file for llama.cpp."""

    format = "gguf"
    backends = ("llama.cpp",)
    dtype_ignored = "`outtype` sets the type of a .gguf file"
    outtype_ignored = None

    def __init__(self, checkpoint: Checkpoint, out: Path, dtype: str | None = None, outtype: str | None = None):
        super().__init__(checkpoint, out)
        self.tokenizer = checkpoint.load_tokenizer()
        self.outtype = outtype or _OUTTYPE_OF[_main_dtype(checkpoint)]

    def write(self, folder: Path, tensors: LazyTensors) -> WrittenFiles:
        """Write the file."""
        path = folder / self.out.name
        result = gguf.write(path, self.config, tensors, self.tokenizer, self.outtype)
        notes = [
            f"kept in {other}: {names} ({_OTHER_TYPE_REASONS[other]})"
            for other, names in group_layers_by_value(result.other_types).items()
        ]
        return WrittenFiles(path, list(result.notes), notes, result.tokens_may_differ)


class Llama2cWriter(Writer):
    """A llama2.c file with its tokenizer.bin."""

    format = "llama2.c"
    dtype_ignored = "llama2.c files are float32"

    def __init__(self, checkpoint: Checkpoint, out: Path, dtype: str | None = None, outtype: str | None = None):
        super().__init__(checkpoint, out)
        self.tokenizer = checkpoint.load_tokenizer()
        llama2c.check_output(out, self.config, self.tokenizer)

    def write(self, folder: Path, tensors: LazyTensors) -> WrittenFiles:
        """Write both files."""
        path = folder / self.out.name
        llama2c.write(path, self.config, tensors, self.tokenizer)
        return WrittenFiles(path, [], [])


_WRITERS = {".gguf": GGUFWriter, ".bin": Llama2cWriter}


def writer_for(out: Path) -> type[Writer]:
    """The writer for the name of an output: NAME.gguf, NAME.bin, or the name of a folder.

    Raises:
        ConfigError: The name is of neither.
    """
    if (writer := _WRITERS.get(out.suffix.lower())) is not None:
        return writer
    check_folder_name(out, "convert", f"{folder_name(out)} for a folder, NAME.gguf or NAME.bin")
    return HuggingFaceWriter


def check_folder_name(out: Path, command: str, hint: str) -> None:
    """Raise ConfigError for the name of a file, which ends in a dot and letters (model-v1.5 is a folder), or "-"."""
    if out.name == "-":
        raise ConfigError(f"{command} can't write to standard output", hint)
    if out.name.rpartition(".")[2].isalpha() and "." in out.name:
        raise ConfigError(f"{command} doesn't write files like {out.name}", hint)


def folder_name(out: Path) -> str:
    """A name for a folder instead of the file `out`."""
    return out.stem.strip(".-") or "model"


def _main_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of most weights of a checkpoint; if it is quantized, of most of its scales, else float16."""
    tensors = checkpoint.tensors.values()
    unquantized = [tensor for tensor in tensors if tensor.stored_dtype in UNQUANTIZED_DTYPES]
    sizes = dtype_sizes(unquantized)
    if len(unquantized) < len(tensors):
        del sizes["float32"]  # vectors: GGUF files keep them in float32 whatever the model's dtype
    return sizes.most_common(1)[0][0] if sizes else "float16"


def _cast(name: str, tensor: LazyTensor, dtype: mx.Dtype) -> LazyTensor:
    """The tensor in `dtype`; reading it raises CheckpointError if float16 can't represent its values."""
    if dtype == tensor.dtype or not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor
    if dtype != mx.float16:
        return tensor.astype(dtype)

    def to_float16(value: mx.array) -> mx.array:
        if not fits_float16(value):
            problem = f"{name} has values up to {max_abs(value):.3g}, the largest float16 is 65504"
            raise CheckpointError(problem, "bfloat16 or float32")
        return value.astype(mx.float16)

    return tensor.transform(to_float16, dtype=mx.float16)


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
