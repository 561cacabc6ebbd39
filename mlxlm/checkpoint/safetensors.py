"""safetensors files: checked before MLX reads them, written in shards.

Format: 8 bytes of header length (little-endian), a JSON header with dtype, shape and offsets of each
tensor, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from mlxlm._mlx import mx
from mlxlm.errors import CheckpointError, os_errors_as
from mlxlm.files import write_json

SHARD_BYTES = 5_000_000_000
_MAX_HEADER = 100_000_000  # the format's own limit
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


def check_file(path: Path) -> list[str]:
    """The names of a file's tensors, after checking that every byte they claim is there.

    Raises CheckpointError naming the file and what is wrong with it. Reads the header only.
    """
    with os_errors_as(CheckpointError, "read", path):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path} is not a whole safetensors file: its header is cut off")
            raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            expected = math.prod(entry["shape"]) * _BITS[entry["dtype"]] // 8
            if not 0 <= first <= last or last - first != expected or min(entry["shape"], default=0) < 0:
                raise CheckpointError(f"{path}: tensor {name} claims {last - first} bytes, its shape needs {expected}")
            if 8 + length + last > size:
                raise CheckpointError(
                    f"{path} is truncated: tensor {name} ends {8 + length + last - size} bytes past the end",
                    "copy or download the file again",
                )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed safetensors header ({type(error).__name__}: {error})") from None
    return list(entries)


def load_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model folder, read on first use.

    Takes `model.safetensors.index.json` where there is one, else every `model*.safetensors`.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is malformed ({type(error).__name__}: {error})") from None
        outside = [f for f in files if f.parent != folder or f.name in ("..", "")]
        if outside:
            raise CheckpointError(f"{index} points outside its folder: {outside[0]}")
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no model*.safetensors", "the folder of a model or of a run")
    weights: dict[str, mx.array] = {}
    for file in files:
        check_file(file)
        try:
            weights.update(mx.load(str(file)))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file} can't be read: {error}") from None
    return weights


def save_weights(folder: Path, weights: dict[str, mx.array], shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with an index as Hugging Face names them.

    A single tensor larger than that gets a shard of its own.
    """
    shards: list[dict[str, mx.array]] = [{}]
    filled = 0
    for name, weight in weights.items():
        if shards[-1] and filled + weight.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = weight
        filled += weight.nbytes
    if len(shards) == 1:
        save_tensors(folder / "model.safetensors", weights)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(folder / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(w.nbytes for w in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def save_tensors(path: Path, tensors: dict[str, mx.array]) -> None:
    """One safetensors file. Raises CheckpointError if it isn't all there afterwards (a full disk)."""
    try:
        mx.save_safetensors(str(path), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        hint = "a disk with more room, or a folder you can write"
        raise CheckpointError(f"cannot write {path}: {error}", hint) from None
    check_file(path)


def as_float32(value: mx.array) -> mx.array:
    """Floating-point values in float32, others as they are."""
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
