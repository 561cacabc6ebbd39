"""A run directory: settings, log and checkpoints, whole at every instant."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlxlm._mlx import mx
from mlxlm.checkpoint.load import list_checkpoints, model_folder, step_of
from mlxlm.checkpoint.safetensors import check_file, load_weights, save_tensors, save_weights
from mlxlm.config import ModelConfig, read_json
from mlxlm.errors import CheckpointError, ConfigError, os_errors_as
from mlxlm.files import new_folder, write_bytes, write_json
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """`config.json`, tokenizer files, `train.json`, `log.jsonl`, `checkpoints/step-N/`, `loss.png`.

    `train.json` holds the settings and where the token shards are: in `data/` inside the run, or
    elsewhere by an absolute path.
    """

    path: Path
    config: ModelConfig
    settings: TrainSettings
    data: Path

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: ModelConfig,
        settings: TrainSettings,
        tokenizer: Tokenizer,
        data: Path,
        adopt: bool = False,
    ) -> Run:
        """Make a new run on prepared `data`; `adopt` moves the data into the run.

        Raises CheckpointError if `path` exists.
        """
        path = Path(path)
        with new_folder(path) as folder:
            write_json(folder / "config.json", config.to_dict())
            tokenizer.save(folder)
            if adopt:
                data.rename(folder / "data")
            where = "data" if adopt else str(data.resolve())
            write_json(folder / "train.json", {"settings": settings.to_dict(), "data": where})
        return cls.open(path)

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """An existing run. Raises CheckpointError or ConfigError naming the file."""
        path = Path(path)
        if not (path / "train.json").exists():
            raise CheckpointError(f"{path} is not a run: it has no train.json", "the --out folder of mlxlm pretrain")
        config = ModelConfig.load(path)
        values = read_json(path / "train.json")
        try:
            settings, data = values["settings"], Path(values["data"])
        except (KeyError, TypeError):
            raise ConfigError(f"{path / 'train.json'}: it needs settings and data") from None
        return cls(path, config, TrainSettings.from_dict(settings, str(path / "train.json")), path / data)

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return list_checkpoints(self.path)

    def save(self, step: TrainStep, state: dict[str, Any]) -> Path:
        """Write `checkpoints/step-N` for `state["step"]` = N and drop what is no longer kept.

        The last `settings.keep` and the one with the lowest validation loss stay.
        """
        target = self.path / "checkpoints" / f"step-{state['step']}"
        with new_folder(target) as folder:
            save_weights(folder, dict(tree_flatten(step.model.parameters())))
            save_tensors(folder / "optimizer.safetensors", step.save_state())
            write_json(folder / "state.json", {**state, "settings": self.settings.to_dict()})
        self._drop_old()
        return target

    def _drop_old(self) -> None:
        kept = {model_folder(self.path), *self.checkpoints()[-self.settings.keep :]}
        for checkpoint in self.checkpoints():
            if checkpoint not in kept:
                doomed = checkpoint.with_name(f".{checkpoint.name}.old")
                with os_errors_as(CheckpointError, "remove", checkpoint):
                    checkpoint.rename(doomed)  # so that a crash while deleting leaves no half checkpoint
                    shutil.rmtree(doomed)

    def restore(self, step: TrainStep) -> dict[str, Any]:
        """Load the last checkpoint into `step`; returns its state. Raises CheckpointError naming the file."""
        for litter in (self.path / "checkpoints").glob(".step-*"):  # of a save that was killed
            shutil.rmtree(litter, ignore_errors=True)
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise CheckpointError(f"{self.path} has no checkpoint to resume from", "starting again under another name")
        folder = checkpoints[-1]
        state = read_json(folder / "state.json")
        optimizer = folder / "optimizer.safetensors"
        check_file(optimizer)
        try:
            step.model.load_weights(list(load_weights(folder).items()))
            step.load_state(mx.load(str(optimizer)))
            if state["step"] != step_of(folder):
                raise ValueError(f"state.json is of step {state['step']}")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} does not fit this run: {error}") from None
        mx.eval(step.state)
        return state

    def log(self, entry: dict[str, Any]) -> None:
        """Append one object to log.jsonl."""
        with os_errors_as(CheckpointError, "write", self.log_file), self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def read_log(self) -> list[dict[str, Any]]:
        """The logged objects; a last line cut off by a crash is left out."""
        if not self.log_file.exists():
            return []
        entries = []
        for line in self.log_file.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def rewind_log(self, step: int) -> None:
        """Drop what was logged after `step`, so that a resumed run doesn't log it twice."""
        kept = [json.dumps(e, ensure_ascii=False) + "\n" for e in self.read_log() if e.get("step", 0) <= step]
        if self.log_file.exists():
            write_bytes(self.log_file, "".join(kept).encode("utf-8"))
