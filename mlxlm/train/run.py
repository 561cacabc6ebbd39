"""A run directory: settings, log and checkpoints, whole at every instant."""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm._mlx import mx
from mlxlm.checkpoint.layout import RUN_FILE, best_checkpoint, is_run, list_checkpoints, state_of, step_of
from mlxlm.checkpoint.safetensors import check_file, load_weights, save_tensors, save_weights
from mlxlm.config import ModelConfig, read_json
from mlxlm.data.manifest import FILE as MANIFEST
from mlxlm.errors import CheckpointError, ConfigError, DataError, os_errors_as
from mlxlm.files import new_folder, write_json
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """`config.json`, tokenizer files, `train.json`, `log.jsonl`, `checkpoints/step-N/`, `loss.png`.

    `train.json` holds the settings, where the token shards are (in `data/` inside the run, or elsewhere by
    an absolute path), and a digest of them.
    """

    path: Path
    config: ModelConfig
    settings: TrainSettings
    data: Path
    data_digest: str

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
            digest = _digest(data)
            write_json(folder / "config.json", config.to_dict())
            tokenizer.save(folder)
            if adopt:
                data.rename(folder / "data")
            where = "data" if adopt else str(data.resolve())
            content = {"settings": settings.to_dict(), "data": where, "data_digest": digest}
            write_json(folder / RUN_FILE, content)
        return cls.open(path)

    @property
    def resume_command(self) -> str:
        """The command that goes on with this run."""
        name = "finetune" if self.settings.answers_only else "pretrain"
        return f"mlxlm {name} --resume {shlex.quote(str(self.path))}"

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """An existing run. Raises CheckpointError or ConfigError naming the file."""
        path = Path(path)
        if not is_run(path):
            raise CheckpointError(f"{path} is not a run: it has no {RUN_FILE}", "the --out folder of mlxlm pretrain")
        config = ModelConfig.load(path)
        values = read_json(path / RUN_FILE)
        try:
            settings, data, digest = values["settings"], path / values["data"], values["data_digest"]
        except (KeyError, TypeError):
            raise ConfigError(f"{path / RUN_FILE}: it needs settings, data and data_digest") from None
        return cls(path, config, TrainSettings.from_dict(settings, str(path / RUN_FILE)), data, digest)

    def announcement(self) -> dict[str, Any]:
        """What a process elsewhere needs to train along: JSON's types, the data by its absolute path."""
        return {
            "path": str(self.path.resolve()),
            "config": self.config.to_dict(),
            "settings": self.settings.to_dict(),
            "data": str(self.data.resolve()),
            "data_digest": self.data_digest,
        }

    @classmethod
    def announced(cls, values: dict[str, Any]) -> Run:
        """The run of an `announcement`; its folder need not be here, its data must be."""
        settings = TrainSettings.from_dict(values["settings"], "the run")
        config = ModelConfig.from_dict(values["config"], "the run")
        return cls(Path(values["path"]), config, settings, Path(values["data"]), values["data_digest"])

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return list_checkpoints(self.path)

    def last_good(self) -> Path | None:
        """The last checkpoint that was saved while the loss was sound; None if there is none."""
        good = [c for c in self.checkpoints() if state_of(c).get("healthy")]
        return good[-1] if good else None

    def check_data(self) -> None:
        """Raise DataError if the shards are not those that the run began with."""
        if _digest(self.data) != self.data_digest:
            raise DataError(f"{self.data} has changed since {self.path} began", "the original shards, or a new run")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process. Raises CheckpointError if another one trains it."""
        with os_errors_as(CheckpointError, "write", self.path):
            file = (self.path / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{self.path} is being trained by another process", "waiting for it") from None
            yield

    def save(self, step: TrainStep, state: dict[str, Any]) -> Path:
        """Write `checkpoints/step-N` for `state["step"]` = N and drop what is no longer kept."""
        target = self.path / "checkpoints" / f"step-{state['step']}"
        with new_folder(target) as folder:
            save_weights(folder, step.weights())
            save_tensors(folder / "optimizer.safetensors", step.save_state())
            write_json(folder / "state.json", {**state, "settings": self.settings.to_dict(), "machine": step.machine})
        self.drop(self.outdated())
        return target

    def outdated(self, coming: int = 0) -> list[Path]:
        """The checkpoints that are no longer kept once `coming` newer ones are there.

        The last `settings.keep`, at least one, the one with the lowest validation loss and the last good one stay.
        """
        recent = self.checkpoints()[-max(1, self.settings.keep - coming) :]
        kept = {best_checkpoint(self.path), self.last_good(), *recent}
        return [checkpoint for checkpoint in self.checkpoints() if checkpoint not in kept]

    def drop(self, checkpoints: list[Path]) -> None:
        for checkpoint in checkpoints:
            doomed = checkpoint.with_name(f".{checkpoint.name}.old")
            with os_errors_as(CheckpointError, "remove", checkpoint):
                checkpoint.rename(doomed)  # so that a crash while deleting leaves no half checkpoint
                shutil.rmtree(doomed)

    def amend(self, step: int, changes: dict[str, Any]) -> None:
        """Change the state of a checkpoint that was saved before its validation."""
        path = self.path / "checkpoints" / f"step-{step}" / "state.json"
        write_json(path, {**read_json(path), **changes})

    def restore(self, step: TrainStep) -> dict[str, Any]:
        """Load the last checkpoint into `step`; returns its state, {} where the run has none yet.

        Raises CheckpointError naming the file, and the checkpoint before it.
        """
        for litter in (self.path / "checkpoints").glob(".step-*"):  # of a save that was killed
            shutil.rmtree(litter, ignore_errors=True)
        checkpoints = self.checkpoints()
        if not checkpoints:
            return {}
        folder = checkpoints[-1]
        try:
            return self._restore(step, folder)
        except (CheckpointError, ConfigError) as error:
            way_back = f"removing it and resuming from {checkpoints[-2].name}" if len(checkpoints) > 1 else None
            raise CheckpointError(error.message, way_back or error.hint) from None

    def _restore(self, step: TrainStep, folder: Path) -> dict[str, Any]:
        state = read_json(folder / "state.json")
        optimizer = folder / "optimizer.safetensors"
        check_file(optimizer)
        try:
            changed = [k for k, v in self.settings.to_dict().items() if state["settings"].get(k) != v]
            if state["step"] != step_of(folder):
                raise ValueError(f"state.json is of step {state['step']}")
            step.load(load_weights(folder), mx.load(str(optimizer)))
            mx.eval(step.state)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{folder} does not fit this run: {error}") from None
        if changed:
            raise CheckpointError(
                f"{self.path / RUN_FILE} has other settings than {folder.name}: {', '.join(changed)}",
                "the settings that the run began with, or a new run",
            )
        return state


def _digest(data: Path) -> str:
    """Of the manifest, which has the digests of the shards."""
    with os_errors_as(DataError, "read", data / MANIFEST):
        return hashlib.sha256((data / MANIFEST).read_bytes()).hexdigest()
