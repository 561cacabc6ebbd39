"""Verify a quantized folder: its tensors, tokenizer and configuration, and optionally its tokens in mlx_lm."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint.bits import bits_of
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.convert.cross_check import cross_check, greedy_tokens
from mlxlm.convert.metadata import Check, check_metadata
from mlxlm.convert.tensor_diff import to_float32
from mlxlm.convert.verify import Progress, comparison_tokens
from mlxlm.utils.errors import CheckpointError

_PROMPT_TOKENS, _GREEDY_TOKENS = 16, 32
# mlx_lm runs only MLX's quantized products, which take 0.02 to 0.9 GB of weights a second on a CPU.
_MAX_CPU_PARAMETERS = 5_000_000


def checksum(value: mx.array) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(bits_of(value).data)


def verify(
    source: Checkpoint, written: Checkpoint, label: str, checksums: Mapping[str, int], progress: Progress
) -> list[Check]:
    """Compare a quantized folder with what was computed, and its tokenizer and configuration with the source's.

    Args:
        source: The source.
        written: The folder, opened again.
        label: Its name in errors.
        checksums: Tensor name -> `checksum` of the value that was written.
        progress: Called as `progress(phase, done, total)`.

    Raises:
        CheckpointError: Something differs.
    """
    for done, (name, tensor) in enumerate(written.tensors.items(), start=1):
        if checksum(tensor.read()) != checksums.get(name):
            raise CheckpointError(f"{label}: {name} is not what was written", "check the disk")
        progress("comparing tensors", done, len(written.tensors))
    unquantized = replace(written, config=written.config.with_changes(quantization=None))
    return [
        Check("tensors", "equal", f"{len(checksums)} tensors, bit for bit"),
        *check_metadata(source, unquantized, label),
    ]


def cross_check_mlx_lm(source: Checkpoint, written: Checkpoint, label: str, progress: Progress) -> Check:
    """Compare our greedy tokens of a quantized folder with those of mlx_lm.

    Raises:
        CheckpointError: mlx_lm predicts other tokens, or can't read the folder although it reads the source.
    """
    config, parameters = written.config, written.config.parameter_count()
    if ON_CPU and parameters > _MAX_CPU_PARAMETERS:
        limit = f"{_MAX_CPU_PARAMETERS // 10**6}M"
        return Check("mlx_lm", "skipped", f"quantized products are slow on a CPU, the limit is {limit} parameters")
    if 4 * parameters > 0.6 * platform.total_memory():
        return Check("mlx_lm", "skipped", f"it needs {4 * parameters / 1e9:.1f} GB of memory in float32")
    # mlx_lm runs some families without their sliding window.
    limits = (config.max_position_embeddings, config.sliding_window, config.longrope_original_length)
    room = min(limit for limit in limits if limit)
    if room < 2:
        return Check("mlx_lm", "skipped", "the model's context is one token")
    prompt = comparison_tokens(source)[: min(_PROMPT_TOKENS, room // 2)]
    # In float32, which mlx_lm is set to as well: rounding of activations would decide ties.
    generated = greedy_tokens(to_float32(written), prompt, min(_GREEDY_TOKENS, room - len(prompt)))
    tokens = [*prompt, *generated]
    [check] = cross_check(source, written, label, ("mlx_lm",), tokens, len(prompt), progress)
    return check
