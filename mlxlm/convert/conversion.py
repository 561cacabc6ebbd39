"""Any checkpoint that mlxlm opens, written in another format with plain weights, and verified."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, huggingface, llama2c
from mlxlm.checkpoint.bits import fits_float16, max_abs
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import UNQUANTIZED_DTYPES, LazyTensor, LazyTensors, with_read_progress
from mlxlm.checkpoint.mlx_lm import unconvertible_hint
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.tokenizer_files import FOLDER_FORMATS, check_tokenizer, copy_tokenizer
from mlxlm.config import ModelConfig
from mlxlm.convert.metadata import Check
from mlxlm.convert.tensor_diff import dequantized_tensors
from mlxlm.convert.verify import Progress, verify
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_files, atomic_new_folder, check_not_exists
from mlxlm.utils.formatting import group_layers_by_value

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
OUTTYPES = gguf.OUTTYPES
_KIND_OF = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
_FORMATS = {".gguf": "gguf", ".bin": "llama2.c"}
_BACKENDS = {"huggingface": ("transformers", "mlx_lm"), "gguf": ("llama.cpp",), "llama2.c": ()}
_NOT_FOLDERS = (".safetensors", ".pt", ".pth", ".json", ".ggml", ".npz")  # of files that this doesn't write


@dataclass(frozen=True)
class ConversionReport:
    """What was written. `dtype` is that of the weights, the one of most first, or the kind of a GGUF file. `checks`:
    what was verified and how, empty without verification. `warnings`: what a person should know; `notes`: what is
    other than asked, as it should be."""

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
        return asdict(self)


def convert(
    source: Path | str,
    out: Path | str,
    *,
    dtype: str | None = None,
    outtype: str | None = None,
    verify_output: bool = True,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write `source` (whatever `open_checkpoint` opens) as `out`: a `.gguf` file, a llama2.c `.bin` file, or else a
    folder in Hugging Face's layout of the model's own family.

    dtype: of a folder's weights, one of `DTYPES`. Left out, each tensor keeps its own; quantized sources and GGUF
    files, which keep vectors in float32 whatever the model has, get the 16-bit type that most of their values
    or scales have, else float16.
    outtype: of a GGUF file's matrices, one of `OUTTYPES`; left out, that of the source's weights.
    progress(phase, done, total): bytes while writing, then steps of each check.

    One tensor is in memory at a time. What is written is verified (see `verify`) before it gets its name.
    Raises CheckpointError or ConfigError: for an output that exists, an architecture that only mlx_lm has, values
    that the output can't hold, and a verification that fails; TokenizerError where `.gguf` or `.bin` lacks
    a tokenizer. Nothing is left then.
    """
    begun = time.monotonic()
    out = Path(out)
    target = output_format(out)
    _check_options(target, dtype, outtype)
    if out.name.startswith(".") and out.name.lower() in _FORMATS or out.suffix.lower() in _NOT_FOLDERS:
        raise ConfigError(f"{out.name} is not a name for what convert writes", "a folder, NAME.gguf or NAME.bin")
    check_not_exists(out, CheckpointError, "another name for the output")
    checkpoint = open_checkpoint(source)
    if checkpoint.config is None:
        raise CheckpointError(
            f"{source} can't be converted: mlxlm's decoder has no {checkpoint.unsupported_reason}",
            unconvertible_hint(checkpoint),
        )
    tokenizer = None if target == "huggingface" else checkpoint.load_tokenizer()
    if tokenizer is None:
        check_tokenizer(checkpoint)  # before the weights are written
    if target == "llama2.c":
        llama2c.check_output_path(out, _dequantized(checkpoint), tokenizer)
    tensors = dequantized_tensors(checkpoint)
    chosen = DTYPES[dtype] if dtype else _own_dtype(checkpoint)
    if target == "gguf":
        outtype = outtype or _KIND_OF[chosen]
    elif target == "huggingface" and (
        dtype or checkpoint.config.quantization or checkpoint.format not in FOLDER_FORMATS
    ):
        tensors = {name: _cast(name, tensor, chosen) for name, tensor in tensors.items()}
    told = tensors if progress is None else with_read_progress(tensors, partial(progress, "writing"))
    place: AbstractContextManager[Path] = atomic_new_folder(out) if target == "huggingface" else atomic_new_files(out)
    with place as folder:
        written = folder if target == "huggingface" else folder / out.name
        warnings, notes, tokens_may_differ = _write(target, written, checkpoint, told, tokenizer, outtype)
        again = open_checkpoint(written)
        checks = []
        if verify_output:
            checks = verify(checkpoint, again, str(out), _BACKENDS[target], progress, tokens_may_differ)
        bits = 8 * sum(tensor.nbytes for tensor in again.tensors.values())
        size = sum(file.stat().st_size for file in folder.iterdir())
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return ConversionReport(
        source=str(source),
        source_format=checkpoint.format,
        path=str(out),
        format=target,
        dtype=outtype or _dtypes(again),
        parameters=parameters,
        bytes=size,
        bits_per_weight=bits / parameters,
        seconds=time.monotonic() - begun,
        checks=checks,
        warnings=[*warnings, *_told_apart(checks)],
        notes=notes,
    )


def output_format(out: Path) -> str:
    """The format that a name asks for: "gguf", "llama2.c" or "huggingface"."""
    return _FORMATS.get(out.suffix.lower(), "huggingface")


def _check_options(target: str, dtype: str | None, outtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not a dtype", f"one of {', '.join(DTYPES)}")
    if outtype is not None and outtype not in OUTTYPES:
        raise ConfigError(f"{outtype!r} is not a kind of GGUF file", f"one of {', '.join(OUTTYPES)}")
    if dtype is not None and target != "huggingface":
        other = "its kind says it" if target == "gguf" else "llama2.c files are float32"
        raise ConfigError(f"a dtype has no effect on a {target} file: {other}", "leaving it out")
    if outtype is not None and target != "gguf":
        raise ConfigError(f"the kind {outtype} is of GGUF files only", "an output that ends in .gguf")


def _dequantized(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of the output, whose weights are plain."""
    return checkpoint.config.with_changes(quantization=None)


def _write(
    target: str,
    path: Path,
    checkpoint: Checkpoint,
    tensors: LazyTensors,
    tokenizer: Tokenizer | None,
    outtype: str | None,
) -> tuple[list[str], list[str], bool]:
    """Write the files; warnings, notes, and whether the warnings say that others will cut text otherwise."""
    config = _dequantized(checkpoint)
    if target == "gguf":
        written = gguf.write(path, config, tensors, tokenizer, outtype)
        kept = [
            f"kept in {outtype}: {names} ({_WHY[outtype]})" for outtype, names in group_layers_by_value(written.other_types).items()
        ]
        return list(written.notes), kept, written.tokens_may_differ
    if target == "llama2.c":
        llama2c.write(path, config, tensors, tokenizer)
        return [], [], False
    huggingface.write(path, checkpoint.hf_config, config, tensors, None)
    return copy_tokenizer(checkpoint, path), [], False


# Why a matrix of a quantized GGUF file is of another type.
_WHY = {"Q8_0": "each of its errors is one of a logit", "F16": "32 doesn't divide their rows"}


def _told_apart(checks: list[Check]) -> list[str]:
    """Warnings about other programs that have their own way with the output, or can't run it."""
    words = {"refused": "can't run this output", "differs": "computes something else"}
    return [f"{check.name} {words[check.result]}: {check.detail}" for check in checks if check.result in words]


def _dtypes(checkpoint: Checkpoint) -> str:
    """The types of the weights, that of most bytes first."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        name = str(tensor.dtype).removeprefix("mlx.core.")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(sorted(sizes, key=sizes.get, reverse=True))


def _own_dtype(checkpoint: Checkpoint) -> mx.Dtype:
    """The dtype of a source's weights: what most of its values are stored in. For quantized matrices, which have
    none, that of most of their scales, else float16."""
    sizes = dict.fromkeys(DTYPES.values(), 0)
    packed = False
    for tensor in checkpoint.tensors.values():
        if tensor.stored_dtype in UNQUANTIZED_DTYPES and tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
        else:
            packed = True
    if packed:  # what is in float32 there are vectors
        sizes[mx.float32] = 0
        if not any(sizes.values()):
            return mx.float16
    return max(sizes, key=sizes.get)


def _cast(name: str, tensor: LazyTensor, dtype: mx.Dtype) -> LazyTensor:
    """The tensor in `dtype`; reading it raises CheckpointError where float16 can't hold its values."""
    if dtype == tensor.dtype or not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor
    if dtype != mx.float16:
        return tensor.astype(dtype)

    def checked(value: mx.array) -> mx.array:
        if not fits_float16(value):
            raise CheckpointError(
                f"{name} has values up to {max_abs(value):.3g}, float16 ends at 65504", "bfloat16 or float32"
            )
        return value.astype(mx.float16)

    return tensor.transform(checked, dtype=mx.float16)
