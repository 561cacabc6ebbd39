"""A quantized folder read again: its tensors, what lies beside them, and what mlx_lm makes of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint.bits import bits_of
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.convert.cross_check import cross_check, greedy_tokens
from mlxlm.convert.metadata import Check, check_metadata
from mlxlm.convert.tensor_diff import to_float32
from mlxlm.convert.verify import comparison_tokens
from mlxlm.utils.errors import CheckpointError

_PROMPT, _GREEDY = 16, 32  # tokens
# MLX's quantized products run at 0.02 to 0.9 GB of weights a second on a CPU, and mlx_lm has no others.
_SLOW = 5_000_000  # parameters


def checksum(value: mx.array) -> int:
    """Of an array's bytes."""
    return zlib.crc32(bits_of(value))


def checks(
    source: Checkpoint, written: Checkpoint, label: str, sums: Mapping[str, int],
    on_progress: Callable[[str, int, int], None],
) -> list[Check]:  # fmt: skip
    """Compare `written`, called `label` in errors, with the checksums `sums` of what was meant to be in it, by tensor,
    with its source's tokenizer and configuration, and its greedy tokens with mlx_lm's on it.

    Raises CheckpointError for what differs, and where mlx_lm refuses it but not its source.
    """
    plain = replace(written, config=written.config.with_changes(quantization=None))
    return [
        _check_tensors(written, label, sums, on_progress),
        *check_metadata(source, plain, label),
        *_ask_mlx_lm(source, written, label, on_progress),
    ]


def _check_tensors(written: Checkpoint, label: str, sums: Mapping[str, int], on_progress) -> Check:
    for done, (name, tensor) in enumerate(written.tensors.items(), start=1):
        if checksum(tensor.read()) != sums.get(name):
            raise CheckpointError(f"{label}: {name} is not what was written", "a disk without errors")
        on_progress("comparing tensors", done, len(written.tensors))
    return Check("tensors", "equal", f"{len(sums)} tensors to the bit as computed")


def _ask_mlx_lm(source: Checkpoint, written: Checkpoint, label: str, on_progress) -> list[Check]:
    parameters = written.config.parameter_count()
    if ON_CPU and parameters > _SLOW:
        reason = f"quantized products are slow on a CPU: up to {_SLOW // 10**6}M parameters are checked there"
        return [Check("mlx_lm", "skipped", reason)]
    if 4 * parameters > 0.6 * platform.total_memory():
        return [Check("mlx_lm", "skipped", f"it needs {4 * parameters / 1e9:.1f} GB for it in float32")]
    config = written.config
    # mlx_lm runs some families without their window.
    limits = (config.max_position_embeddings, config.sliding_window, config.longrope_original_length)
    room = min(limit for limit in limits if limit)
    if room < 2:
        return [Check("mlx_lm", "skipped", "its context is of one token")]
    ids = comparison_tokens(source)[: min(_PROMPT, room // 2)]
    ours = greedy_tokens(
        to_float32(written), ids, min(_GREEDY, room - len(ids))
    )  # in the dtype that mlx_lm is asked in
    return cross_check(source, written, label, ("mlx_lm",), [*ids, *ours], len(ids), on_progress)
