"""Locate a model's files: config.json and weights of each format in a folder, or in a run with its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import read_json_object

RUN_FILE = "train.json"
QUANTIZATION_REPORT, QUANTIZATION_PLOT = "quantization.json", "quantization.png"  # in the folder of a quantized model
SUITE_FILE = "suite.json"  # in a run's folder: scores of its checkpoints
MODEL_FILE = "model.safetensors"  # of a model folder or a checkpoint; in a run, that of its best checkpoint
GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # name of a part of a split model
_GGUF_QUANTIZATION = re.compile(r"(?<![A-Z0-9])(?:(?:UD-)?[IT]?Q\d\w*|B?F16|F32|MXFP4\w*)(?=[.-])")
FOLDER_FORMATS = ("safetensors", "pytorch")  # of weights with config.json and the tokenizer's files next to them
SAFETENSORS_INDEX, PYTORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
MAX_INDEX = 24_000_000  # bytes of an index
_MAX_STATE = 4 << 20  # bytes of state.json, which has a few hundred
_NOT_MODELS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # PyTorch files of training scripts


@dataclass(frozen=True)
class Location:
    """`root` has config.json and the tokenizer, `weights` the safetensors; they differ for a checkpoint of a run."""

    root: Path
    weights: Path


def locate(path: Path | str) -> Location:
    """Find a model: a model folder, a run, or `RUN/checkpoints/step-N`.

    Of a run, this is the best checkpoint, or the run's own weights if it has no checkpoints.

    Raises:
        CheckpointError: There is no model.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no model folder {path}", "a model folder, a run, a .gguf file, or a hub id")
    if checkpoint_step(path) >= 0 and is_run_folder(path.absolute().parents[1]):
        return Location(path.absolute().parents[1], path)
    if not is_run_folder(path):
        return Location(path, path)
    best = best_checkpoint(path)
    if best is None and (path / MODEL_FILE).is_file():
        return Location(path, path)
    if best is None:
        raise CheckpointError(f"{path} is a run that has no checkpoint yet", "mlxlm pretrain --resume")
    return Location(path, best)


def weights_format(folder: Path) -> str | None:
    """The one of `FOLDER_FORMATS` that a folder has weights of, safetensors first; None if it has none."""
    if (folder / SAFETENSORS_INDEX).exists() or any(folder.glob("model*.safetensors")):
        return "safetensors"
    return "pytorch" if has_pytorch(folder) else None


def has_pytorch(folder: Path) -> bool:
    """Whether a folder has a model in PyTorch's format."""
    return (folder / PYTORCH_INDEX).exists() or bool(pytorch_files(folder))


def pytorch_files(folder: Path) -> list[Path]:
    """A folder's `pytorch_model*.bin`, else its only `.bin`, `.pt` or `.pth` file that isn't of a training script."""
    files = sorted(folder.glob("pytorch_model*.bin"))
    if files:
        return files
    files = [file for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}")]
    files = [file for file in files if not file.name.startswith(_NOT_MODELS)]
    return files if len(files) == 1 else []


def has_all_safetensors(folder: Path) -> bool:
    """Whether a folder has all safetensors of its index and no links to nothing, as an interrupted download leaves."""
    if weights_format(folder) != "safetensors" or any(not file.exists() for file in folder.iterdir()):
        return False
    files: Mapping[str, Any] = {}
    if (folder / SAFETENSORS_INDEX).exists():
        with suppress(CheckpointError):  # reported where it is opened
            files = read_json_object(folder / SAFETENSORS_INDEX, MAX_INDEX, CheckpointError).get("weight_map") or {}
    return all((folder / str(file)).is_file() for file in set(map(str, files.values())))


def gguf_models(folder: Path) -> list[list[Path]]:
    """The GGUF models in a folder, see `group_gguf`."""
    return group_gguf(file for file in folder.glob("*.gguf") if file.is_file())


def group_gguf(files: Iterable[Path]) -> list[list[Path]]:
    """The GGUF models among files, each as its file or the parts of a split model, without image encoders (mmproj)."""
    models: dict[str, list[Path]] = {}
    for file in sorted(files):
        if not is_image_encoder(file):
            part = GGUF_PART.fullmatch(str(file))
            models.setdefault(f"{part[1]} {part[3]}" if part else str(file), []).append(file)
    return list(models.values())


def gguf_quantization(file: Path) -> str | None:
    """The quantization that a GGUF file has in its name, such as Q4_K_M; None without one."""
    found = _GGUF_QUANTIZATION.findall(file.name.upper())
    return found[-1] if found else None


def is_image_encoder(file: Path) -> bool:
    """Whether a GGUF file is the image encoder that belongs to another file, by llama.cpp's convention of names."""
    return "mmproj" in file.name.lower()


def is_run_folder(path: Path) -> bool:
    """Whether a folder is a training run."""
    return (path / RUN_FILE).is_file()


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((p for p in (run / "checkpoints").glob("step-*") if checkpoint_step(p) >= 0), key=checkpoint_step)


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, the latest of equal ones; None if there is none."""
    return min(
        list_checkpoints(run),
        key=lambda c: (validation_loss(read_checkpoint_state(c)), -checkpoint_step(c)),
        default=None,
    )


def checkpoint_step(checkpoint: Path) -> int:
    """The step of `.../step-N`, -1 for other names."""
    prefix, _, number = checkpoint.name.partition("-")
    return int(number) if prefix == "step" and number.isascii() and number.isdigit() else -1


def read_checkpoint_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's `state.json`; {} if it can't be read."""
    try:
        state = json.loads(read_bytes(checkpoint / "state.json", _MAX_STATE, CheckpointError))
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def validation_loss(state: Mapping[str, Any]) -> float:
    """Validation loss in a checkpoint's state; infinity if there was no validation."""
    loss = state.get("validation_loss")
    return loss if isinstance(loss, int | float) else float("inf")
