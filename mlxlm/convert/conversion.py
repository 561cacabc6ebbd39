"""Convert any checkpoint that mlxlm opens to another format, and verify the result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, llama2c
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import rounded_scales
from mlxlm.checkpoint.gguf import affine
from mlxlm.checkpoint.huggingface import check_tokenizer, copy_tokenizer, write_checkpoint
from mlxlm.checkpoint.lazy_tensor import (
    UNQUANTIZED_DTYPES,
    LazyTensor,
    LazyTensors,
    dtype_sizes,
    max_abs,
    with_read_progress,
)
from mlxlm.checkpoint.locations import FOLDER_FORMATS
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.convert.metadata import Check
from mlxlm.convert.verify import Progress, verify
from mlxlm.utils.errors import ArgumentError, CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_files, atomic_new_folder, check_not_exists
from mlxlm.utils.formatting import group_layers_by_value

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
OUTTYPES = gguf.OUTTYPES
_MAX_FLOAT16 = 65504
_OUTTYPE_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Why a matrix of a GGUF file is of another type than the outtype, also for K-quants.
_OTHER_TYPE_REASONS = {
    "Q8_0": "its errors are errors of the logits",
    "Q4_1": "as in llama.cpp",
    "F16": "its rows are not a multiple of 32",
    "MXFP4": "as in the source",
}
_OTHER_K_REASONS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q5_1", "Q8_0"), "its rows are not a multiple of 256"),
    **dict.fromkeys(("Q3_K", "Q4_K", "Q5_K", "Q6_K"), "as in llama.cpp"),
    "F16": "its rows are not a multiple of 32",
}


@dataclass(frozen=True)
class OutputFormat:
    """A format that `convert` writes.

    Attributes:
        name: Name of the format, as in `Checkpoint.format` or "huggingface".
        write: `write(source, tensors, path, out, type)` writes the model to `path`, a new folder or file that becomes
            `out`. `type` is the requested one, if any. In a folder without one, the tensors are quantized as those of
            `source`, otherwise dequantized.
        ignored: "dtype" or "outtype" -> why it has no effect.
    """

    name: str
    write: Callable[[WritableCheckpoint, LazyTensors, Path, Path, str | None], gguf.WriteResult]
    ignored: Mapping[str, str]


def _write_folder(
    source: WritableCheckpoint, tensors: LazyTensors, path: Path, out: Path, type: str | None
) -> gguf.WriteResult:
    """Write the model family's own Hugging Face layout, or that of mlx_lm's class."""
    check_tokenizer(source)  # before minutes of work
    quantization = None if type else source.quantization
    if quantization:  # except matrices that MLX has no format for
        kept = {name for name, t in tensors.items() if t.stored_dtype in UNQUANTIZED_DTYPES or _is_part(name, tensors)}
    elif type or source.format not in FOLDER_FORMATS or _quantized_types(source.tensors):
        kept = {name for name in tensors if source.keeps_dtype(name)}
    else:
        kept = set(tensors)
    target = DTYPES[type or _main_dtype(source)]
    tensors = {name: t if name in kept else _cast(name, t, target) for name, t in tensors.items()}
    write_checkpoint(path, source.with_tensors(tensors, quantization))
    return gguf.WriteResult(copy_tokenizer(source, path))


def _is_part(name: str, tensors: LazyTensors) -> bool:
    """Whether a tensor is a part of a matrix in one of MLX's quantized formats."""
    return f"{name.rpartition('.')[0]}.scales" in tensors


def _quantized_types(tensors: LazyTensors) -> dict[str, str]:
    """The stored types of matrices that are dequantized when they are read, by module."""
    return {
        name.rpartition(".")[0]: tensor.stored_dtype
        for name, tensor in tensors.items()
        if tensor.stored_dtype not in UNQUANTIZED_DTYPES and not _is_part(name, tensors)
    }


def _write_gguf(
    source: WritableCheckpoint,
    tensors: LazyTensors,
    path: Path,
    out: Path,
    type: str | None,
    importance: Mapping[str, np.ndarray] | None = None,
) -> gguf.WriteResult:
    """Write a file for llama.cpp. Experts in MXFP4 stay so, unless another type is requested."""
    config, outtype = _decoder_config(source), type or _OUTTYPE_OF[_main_dtype(source)]
    mxfp4 = _mxfp4_experts(source) if type in (None, "MXFP4") else {}
    return gguf.write(path, config, tensors, source.load_tokenizer(), outtype, importance, mxfp4)


def _with_packed(source: WritableCheckpoint) -> WritableCheckpoint:
    """The source with the matrices quantized that MLX has a format for."""
    return source.packed or source if isinstance(source, Checkpoint) else source


def _mxfp4_experts(source: WritableCheckpoint) -> dict[str, tuple[LazyTensor, LazyTensor]]:
    """The packed weights and the scales of experts in MXFP4, by module."""
    packed = _with_packed(source)
    quantization, tensors = packed.quantization or {}, packed.tensors
    modules = [name.removesuffix(".scales") for name, t in tensors.items() if name.endswith(".scales")]
    stacks = [module for module in modules if len(tensors[f"{module}.weight"].shape) == 3]
    formats = {module: module_quantization(quantization, module) for module in stacks}
    kept = [module for module, format in formats.items() if format and format["mode"] == "mxfp4"]
    return {module: (tensors[f"{module}.weight"], tensors[f"{module}.scales"]) for module in kept}


def _write_llama2c(
    source: WritableCheckpoint, tensors: LazyTensors, path: Path, out: Path, type: str | None
) -> gguf.WriteResult:
    """Write a llama2.c file with its tokenizer.bin."""
    config, tokenizer = _decoder_config(source), source.load_tokenizer()
    llama2c.check_output(out, config, tokenizer)
    llama2c.write(path, config, tensors, tokenizer)
    return gguf.WriteResult()


def _decoder_config(source: WritableCheckpoint) -> ModelConfig:
    """The configuration of a source's weights once they are dequantized.

    Raises:
        CheckpointError: mlxlm's decoder doesn't implement the architecture.
    """
    if isinstance(source, ModuleCheckpoint):
        problem = f"a {source.config.model_type} model can only be written to a folder"
        raise CheckpointError(problem, "--out with the name of a folder")
    return source.config.with_changes(quantization=None)


_OUTTYPE_IGNORED = {"outtype": "it is for .gguf files"}
_FOLDER = OutputFormat("huggingface", _write_folder, _OUTTYPE_IGNORED)
_FILES = {
    ".gguf": OutputFormat("gguf", _write_gguf, {"dtype": "`outtype` sets the type of a .gguf file"}),
    ".bin": OutputFormat("llama2.c", _write_llama2c, {"dtype": "llama2.c files are float32", **_OUTTYPE_IGNORED}),
}


def output_format(out: Path) -> OutputFormat:
    """The format for the name of an output: NAME.gguf, NAME.bin, or the name of a folder.

    Raises:
        ConfigError: The name is of neither.
    """
    suffix = out.suffix.lower()
    if suffix not in _FILES:
        check_folder_name(out, "convert", f"{folder_name(out)} for a folder, NAME.gguf or NAME.bin")
    return _FILES.get(suffix, _FOLDER)


def check_folder_name(out: Path, command: str, hint: str) -> None:
    """Raise ConfigError for the name of a file, which ends in a dot and letters (model-v1.5 is a folder), or "-"."""
    if out.name == "-":
        raise ConfigError(f"{command} can't write to standard output", hint)
    if out.name.rpartition(".")[2].isalpha() and "." in out.name:
        raise ConfigError(f"{command} doesn't write files like {out.name}", hint)


def folder_name(out: Path) -> str:
    """A name for a folder instead of the file `out`."""
    return out.stem.strip(".-") or "model"


def _main_dtype(checkpoint: WritableCheckpoint) -> str:
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
        if _MAX_FLOAT16 < (largest := max_abs(value)) < math.inf:
            problem = f"{name} has values up to {largest:.3g}, the largest float16 is {_MAX_FLOAT16}"
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
        dtype: Dtypes of the weights, the most frequent one first; for a GGUF file its outtype, for a quantized folder
            its bits ("4-bit, 8-bit").
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
    adapter: Path | str | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
    verify_output: bool = True,
    progress: Progress = lambda phase, done, total: None,
) -> ConversionReport:
    """Convert a checkpoint to the format that the name `out` stands for.

    One tensor is in memory at a time. If anything fails, `out` is not created.

    Args:
        source: Whatever `open_checkpoint` opens.
        out: `NAME.gguf` for llama.cpp, `NAME.bin` for llama2.c, or a folder in the Hugging Face layout of the model's
            family.
        dtype: Dtype of a folder's weights, one of `DTYPES`; quantized ones are dequantized. By default each tensor
            keeps its own, and quantized matrices stay quantized, in MLX's format (see `mlxlm.checkpoint.gguf.affine`
            and `quantized_formats`). Those that MLX has no format for get the 16-bit dtype of most other values.
        outtype: Type of a GGUF file's matrices, one of `OUTTYPES`. By default the type of most of the source's weights.
        adapter: Folder or hub id of an adapter that is merged into the weights.
        importance: Importance weights of the columns of matrices, for an `outtype` of at most 6 bits: what
            `mlxlm.quantize.importance_weights` returns for the same source.
        verify_output: Read the output again and compare it with the source, see `verify`.
        progress: Called as `progress(phase, done, total)`: bytes while writing, then the steps of each check.

    Raises:
        ArgumentError: An argument has no effect on this format.
        CheckpointError: `out` exists, the output can't represent a value, or the verification fails.
        ConfigError: Unknown types, or a name of another format.
        TokenizerError: The format needs a tokenizer that the source doesn't have.
    """
    started = time.monotonic()
    out = Path(out)
    format = output_format(out)
    for name, value, choices in (("dtype", dtype, DTYPES), ("outtype", outtype, OUTTYPES)):
        if value is not None and value not in choices:
            raise ConfigError(f"unknown {name} {value!r}", f"one of {', '.join(choices)}")
        if value is not None and name in format.ignored:
            raise ArgumentError(f"`{name}` would have no effect: {format.ignored[name]}")
    if importance and outtype not in gguf.IMPORTANCE_OUTTYPES:
        hint = f"`outtype` {', '.join(gguf.IMPORTANCE_OUTTYPES)}"
        raise ArgumentError(f"`importance` would have no effect on {outtype or 'unquantized weights'}", hint)
    check_not_exists(out, CheckpointError, "another name for the output")
    source_checkpoint = open_module_checkpoint(source, adapter)
    is_folder = format is _FOLDER
    packed = _packed(source_checkpoint) if is_folder and dtype is None else None
    unpacked = dequantized_tensors(source_checkpoint)
    parameters = sum(math.prod(tensor.shape) for tensor in unpacked.values())
    tensors = with_read_progress(packed.tensors if packed else unpacked, partial(progress, "writing"))
    with atomic_new_folder(out) if is_folder else atomic_new_files(out) as folder:
        path = folder if is_folder else folder / out.name
        write = partial(_write_gguf, importance=importance) if importance else format.write
        files = write(packed or source_checkpoint, tensors, path, out, dtype or outtype)
        written = open_module_checkpoint(path)
        checks = []
        if verify_output:
            checks = verify(source_checkpoint, written, str(out), progress, bool(importance))
        size = sum(file.stat().st_size for file in folder.iterdir())
    sizes, other_types = dtype_sizes(written.tensors.values()), group_layers_by_value(files.other_types)
    reasons = _OTHER_K_REASONS if "_K" in (files.outtype or "") else _OTHER_TYPE_REASONS
    if files.outtype == "MXFP4":
        reasons = {**reasons, "Q8_0": "only experts have 4 bits, as in llama.cpp"}
    notes = [f"kept in {kind}: {names} ({reasons[kind]})" for kind, names in other_types.items()]
    return ConversionReport(
        source=str(source),
        source_format=source_checkpoint.format,
        path=str(out),
        format=format.name,
        dtype=files.outtype or ", ".join(_bits(written) or (name for name, _ in sizes.most_common())),
        parameters=parameters,
        bytes=size,
        bits_per_weight=8 * sizes.total() / parameters,
        seconds=time.monotonic() - started,
        checks=checks,
        warnings=files.warnings,
        notes=[*notes, *(_folder_notes(source_checkpoint, packed) if is_folder and dtype is None else ())],
    )


def _packed(source: WritableCheckpoint) -> WritableCheckpoint | None:
    """The source with its quantized matrices in MLX's formats, None if it has none.

    Scales and biases are float32 only if the dtype of most other tensors would round one of them.
    """
    packed = _with_packed(source)
    if not packed.quantization:
        return None
    narrow = rounded_scales(packed.tensors)
    if not all(mx.array_equal(t.read(), packed.tensors[name].read()).item() for name, t in narrow.items()):
        return packed
    return packed.with_tensors({**packed.tensors, **narrow}, packed.quantization)


def _bits(written: WritableCheckpoint) -> list[str]:
    """The bits of quantized matrices, those with most scales first."""
    sizes: Counter[int] = Counter()
    for name, tensor in written.tensors.items():
        module, _, part = name.rpartition(".")
        if part == "scales" and (plan := module_quantization(written.quantization or {}, module)):
            sizes[plan["bits"]] += tensor.nbytes
    return [f"{bits}-bit" for bits, _ in sizes.most_common()]


def _folder_notes(source: WritableCheckpoint, packed: WritableCheckpoint | None) -> list[str]:
    """What became of the quantized matrices of the source in a folder."""
    notes = []
    if packed:
        notes.append("the matrices stay quantized, in MLX's format, which transformers doesn't read")
        kinds = affine.packed_types(packed.tensors) if source.format == "gguf" else {}
        rounded = {name: kind for name, kind in kinds.items() if not affine.is_exact(kind)}
        for kind, names in group_layers_by_value(rounded).items():
            notes.append(f"rounded from {kind} to {affine.ROUNDED_BITS} bits: {names}")
        if any(tensor.dtype != mx.float32 for tensor in rounded_scales(packed.tensors).values()):
            reason = f"{_main_dtype(packed)} would round some of them: activations are float32, too"
            notes.append(f"scales and biases are float32, because {reason}")
    for kind, names in group_layers_by_value(_quantized_types((packed or source).tensors)).items():
        notes.append(f"dequantized from {kind}, which MLX has no format for: {names}")
    return notes
