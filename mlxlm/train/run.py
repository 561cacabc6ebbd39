"""A run directory: settings, log and checkpoints. It is complete at every moment."""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import huggingface, locations
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.locations import MODEL_FILE, RUN_FILE, best_checkpoint, read_checkpoint_state, validation_loss
from mlxlm.checkpoint.map_weights import to_file_weights
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import file_tensors, write_hashed
from mlxlm.config import ModelConfig
from mlxlm.data.manifest import MANIFEST_FILE, is_prepared
from mlxlm.families import config_from_hf, config_to_hf, load_config
from mlxlm.report import LOSS_PLOT_FILE, REPORT_FILE, plot_losses, read_run, write_report
from mlxlm.report.log_entries import LOG_FILE, number, read_log_entries
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.train.settings import LENGTH_SETTINGS, REPEAT_PLAN_FILE, TrainSettings
from mlxlm.train.step import TrainStep
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError, os_errors_as
from mlxlm.utils.files import atomic_new_folder, commit_file, same_file, stage_copy
from mlxlm.utils.json_files import read_json, write_json

OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"  # of a checkpoint
RECIPE_FILE = "recipe.json"  # of a run on the built-in corpus, see `mlxlm.experiments.receipt`


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint remembers of a run after step `step`, besides arrays: its `state.json`.

    Attributes:
        step: The last finished step; 0 before the first.
        seconds: Time spent in steps, without pauses.
        steps: Number of steps of the run, or with a time limit an estimate; None: as in the settings. See `RunClock`.
        elapsed: Seconds of wall-clock time without pauses. See `RunClock`.
        next_validation: The value of `elapsed` at which the next validation is due. See `RunClock`.
        validation_loss: Nats per token; None if this step was not validated.
        best: `step`, `loss` and `bits_per_byte` of the best validation so far.
        healthy: Whether the loss was normal. See `SpikeDetector`.
        spike_detector: State of the `SpikeDetector`.
    """

    step: int = 0
    seconds: float = 0.0
    steps: int | None = None
    elapsed: float = 0.0
    next_validation: float = 0.0
    validation_loss: float | None = None
    best: dict[str, Any] | None = None
    healthy: bool = True
    spike_detector: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Read the entries of a `state.json`; it also has the settings, the environment and digests."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


@dataclass(frozen=True)
class Run:
    """A run directory, which transformers and mlx_lm load as a model.

    It has `config.json`, tokenizer files, `train.json`, `log.jsonl`, `checkpoints/step-N/`, `loss.png`, `report.html`,
    and `model.safetensors`: the weights of the best checkpoint. `train.json` has the settings, the location of the
    token shards (in `data/` inside the run, or an absolute path), and a digest of them.
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
        move_data: bool = False,
    ) -> Run:
        """Make a new run on the prepared data in `data`; `move_data` moves the data into the run.

        Raises:
            CheckpointError: `path` exists.
        """
        path = Path(path)
        with atomic_new_folder(path) as folder:
            digest = _digest(data)
            huggingface.write_config(folder, {}, config, "float32")
            tokenizer.save(folder)
            if move_data:
                data.rename(folder / "data")
            location = "data" if move_data else str(data.resolve())
            _write_run_file(folder, settings, location, digest)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Open an existing run. Raises CheckpointError or ConfigError naming the file."""
        path = Path(path)
        if not locations.is_run_folder(path):
            raise CheckpointError(f"{path} is not a run: it has no {RUN_FILE}", "the --out folder of mlxlm pretrain")
        config = load_config(path)
        values = read_json(path / RUN_FILE)
        try:
            settings, data, digest = values["settings"], path / values["data"], values["data_digest"]
        except (KeyError, TypeError):
            raise ConfigError(f"{path / RUN_FILE}: it needs settings, data and data_digest") from None
        return cls(path, config, TrainSettings.from_dict(settings, str(path / RUN_FILE)), data, digest)

    def with_data(self, data: Path) -> Run:
        """Record that the prepared data was moved to the folder `data`, and return the run.

        Raises:
            DataError: `data` has other data.
            CheckpointError: The run can't be written, or is being trained.
        """
        if _digest(data) != self.data_digest:
            raise DataError(f"{data} has other data than {self.path} began with", "the folder that was moved")
        with self.locked():
            replace(self, data=data).write_settings(self.settings)
        return Run.open(self.path)

    def write_settings(self, settings: TrainSettings) -> None:
        """Replace the settings in `train.json`. Raises CheckpointError if it can't be written."""
        folder, data = self.path.resolve(), self.data.resolve()
        location = data.relative_to(folder) if data.is_relative_to(folder) else data
        _write_run_file(self.path, settings, str(location), self.data_digest)

    @property
    def command(self) -> str:
        """The command of mlxlm that began it: "pretrain", "finetune" or "grpo". The first event of the log tells."""
        first = next(read_log_entries(self.log_file), {}).get("event")
        commands = {"conversations": "finetune", "preferences": "finetune", "prompts": "grpo"}
        return commands.get(str(first), "pretrain")

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        name = "speedrun" if (self.path / RECIPE_FILE).is_file() else self.command
        reward = f" --reward {shlex.quote(self.settings.grpo.reward or 'FILE')}" if self.settings.grpo else ""
        return f"mlxlm {name} --resume {shlex.quote(str(self.path))}{reward}"

    def worker_config(self) -> dict[str, Any]:
        """Return what a process on another machine needs to take part, as JSON values."""
        return {
            "path": str(self.path.resolve()),
            "config": config_to_hf(self.config),
            "settings": self.settings.to_dict(),
            "data": str(self.data.resolve()),
            "data_digest": self.data_digest,
        }

    @classmethod
    def from_worker_config(cls, values: dict[str, Any]) -> Run:
        """Return the run of a `worker_config`. Its folder need not be on this machine; its data must be."""
        settings = TrainSettings.from_dict(values["settings"], "the run")
        config = config_from_hf(values["config"], "the run")
        return cls(Path(values["path"]), config, settings, Path(values["data"]), values["data_digest"])

    @property
    def log_file(self) -> Path:
        """The log, see `RunLog`."""
        return self.path / LOG_FILE

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return locations.list_checkpoints(self.path)

    def last_good(self) -> Path | None:
        """Return the last checkpoint that was saved while the loss was normal; None if there is none."""
        good = [c for c in self.checkpoints() if read_checkpoint_state(c).get("healthy")]
        return good[-1] if good else None

    def check_data(self) -> None:
        """Raise DataError if the manifest, which has the digests of the shards, is not the one the run began with."""
        with os_errors_as(DataError, "read", self.data):
            prepared = is_prepared(self.data)
        if not prepared:
            hint = f"{self.resume_command} --data FOLDER, if it was moved there"
            raise DataError(f"the data of {self.path} is not in {self.data}", hint)
        if _digest(self.data) != self.data_digest:
            raise DataError(f"{self.data} has changed since {self.path} began", "the original shards, or a new run")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for this process. Raises CheckpointError if another one trains it."""
        with os_errors_as(CheckpointError, "write", self.path):
            file = (self.path / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{self.path} is being trained by another process", "waiting for it") from None
            yield

    def save_checkpoint(self, step: TrainStep, state: TrainState) -> Path:
        """Save the checkpoint `checkpoints/step-N` with N = `state.step`, and delete expired ones.

        If it is the best checkpoint, it becomes the run's `model.safetensors`, which is complete at every moment.
        Everything that may need room on the disk is written before the checkpoint appears.
        """
        target, model = self.path / "checkpoints" / f"step-{state.step}", None
        lazy_weights, lazy_state = (
            {name: lazy_tensor(x) for name, x in arrays.items()} for arrays in (step.weights(), step.save_state())
        )
        weights = to_file_weights(families.weight_mappings(self.config), lazy_weights)
        content = {**asdict(state), "settings": self.settings.to_dict(), "environment": step.environment}
        try:
            with atomic_new_folder(target) as folder:
                digests = {
                    MODEL_FILE: write_hashed(folder / MODEL_FILE, weights, format="pt"),
                    OPTIMIZER_FILE: write_hashed(folder / OPTIMIZER_FILE, lazy_state),
                }
                write_json(folder / STATE_FILE, {**content, "sha256": digests})
                best = best_checkpoint(self.path)
                if best is None or validation_loss(content) <= validation_loss(read_checkpoint_state(best)):
                    model = stage_copy(folder / MODEL_FILE, self.path / MODEL_FILE)
            if model is not None:
                commit_file(model, self.path / MODEL_FILE)
        finally:
            if model is not None:
                model.unlink(missing_ok=True)
        self.delete_checkpoints(self.expired_checkpoints())
        return target

    def expired_checkpoints(self, upcoming: int = 0) -> list[Path]:
        """Return the checkpoints to delete once `upcoming` newer ones are saved.

        The last `settings.save_total_limit` stay (at least one), and so do the best and the last good one.
        """
        recent = self.checkpoints()[-max(1, self.settings.save_total_limit - upcoming) :]
        staying = {best_checkpoint(self.path), self.last_good(), *recent}
        return [checkpoint for checkpoint in self.checkpoints() if checkpoint not in staying]

    def delete_checkpoints(self, checkpoints: list[Path]) -> None:
        """Delete `checkpoints`. A crash leaves no incomplete one."""
        for checkpoint in checkpoints:
            hidden = checkpoint.with_name(f".{checkpoint.name}.old")
            with os_errors_as(CheckpointError, "remove", checkpoint):
                checkpoint.rename(hidden)
                shutil.rmtree(hidden)

    def write_plots(self) -> None:
        """Write `loss.png` and `report.html`, if a step was logged. Raises CheckpointError if they can't be written."""
        history = read_run(self.path)
        if history.steps["step"]:
            plot_losses(history, self.path / LOSS_PLOT_FILE)
            write_report([history], self.path / REPORT_FILE, TrainSettings.defaults)

    def update_state(self, step: int, changes: dict[str, Any]) -> None:
        """Change entries of the `state.json` of a checkpoint, for example after a validation that came later."""
        path = self.path / "checkpoints" / f"step-{step}" / STATE_FILE
        write_json(path, {**read_json(path), **changes})
        self.update_model()

    def update_model(self) -> None:
        """Make the best checkpoint the run's `model.safetensors`, if it isn't yet."""
        best = best_checkpoint(self.path)
        if best is None or not (best / MODEL_FILE).is_file():  # `load_checkpoint` reports a missing file
            return
        if not same_file(best / MODEL_FILE, self.path / MODEL_FILE):
            commit_file(stage_copy(best / MODEL_FILE, self.path / MODEL_FILE), self.path / MODEL_FILE)

    def clean_up_after_crash(self) -> None:
        """Delete what a save left that was killed, and make the best checkpoint the run's `model.safetensors`."""
        for partial_folder in (self.path / "checkpoints").glob(".step-*"):
            shutil.rmtree(partial_folder, ignore_errors=True)
        self.update_model()

    def load_checkpoint(self, step: TrainStep) -> dict[str, Any]:
        """Load the last checkpoint into `step` and return its `state.json`; {} if there is no checkpoint yet.

        Raises:
            CheckpointError: Naming the file, and the checkpoint before it.
        """
        checkpoints = self.checkpoints()
        if not checkpoints:
            return {}
        try:
            return self._load(step, checkpoints[-1])
        except (CheckpointError, ConfigError) as error:
            hint = error.hint
            if len(checkpoints) > 1:
                hint = f"removing {checkpoints[-1]}, after which a resume continues from {checkpoints[-2].name}"
            raise CheckpointError(error.message, hint) from None

    def _load(self, step: TrainStep, folder: Path) -> dict[str, Any]:
        state, optimizer = read_json(folder / STATE_FILE), folder / OPTIMIZER_FILE
        file_tensors(optimizer)
        tensors = open_checkpoint(folder).tensors
        try:
            saved = TrainSettings.from_dict(state["settings"], str(folder / STATE_FILE)).to_dict()
            changed = [name for name, value in self.settings.to_dict().items() if saved[name] != value]
            if state["step"] != locations.checkpoint_step(folder):
                raise ValueError(f"state.json is of step {state['step']}")
            for name in (MODEL_FILE, OPTIMIZER_FILE):
                if file_sha256(folder / name, CheckpointError) != state["sha256"][name]:
                    problem = f"has changed since it was saved: its SHA-256 is not the one in {STATE_FILE}"
                    raise CheckpointError(f"{folder / name} {problem}", "an unchanged copy of this file, or a new run")
            # Contiguous, as they were: a product with a transposed view may differ in the last bit.
            weights = {name: mx.contiguous(tensor.read()) for name, tensor in tensors.items()}
            step.load(weights, mx.load(str(optimizer)))
            mx.eval(step.state)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{folder} does not fit this run: {error}") from None
        if self.settings.rewarm_step is not None and state["step"] <= self.settings.rewarm_step:  # see `extend_run`
            changed = [name for name in changed if name not in LENGTH_SETTINGS]
            state["steps"] = None
        if changed:
            problem = f"{self.path / RUN_FILE} has other settings than {folder.name}: {', '.join(changed)}"
            raise CheckpointError(problem, "the settings that the run began with, or a new run")
        return state


def repeat_run(out: Path | str, original: Run) -> Run:
    """Make the run `out`, which repeats `original` step by step.

    The learning rates of a run with a time limit follow the clock, and so does its end, so starting the same command
    again gives other weights. Its log has the learning rate of each step and each validation. The new run has a copy of
    the log, the same rates and validations, and ends with the same weights, to the bit on the same machine. It uses the
    data of `original` at its location.

    Raises:
        CheckpointError: `out` exists, or `original` started from a model or hasn't finished.
        DataError: The data of `original` has changed or is gone.
    """
    events = [entry["event"] for entry in read_log_entries(original.log_file)]
    if original.command != "pretrain" or "initialized" in events:
        problem = f"{original.path} started from a model, and only runs from scratch can be repeated"
        raise CheckpointError(problem, "the command that started it with --steps, which repeats itself")
    original.check_data()
    run = Run.create(out, original.config, repeat_settings(original), load(original.path), original.data)
    with os_errors_as(CheckpointError, "write", run.path):
        shutil.copyfile(original.log_file, run.path / REPEAT_PLAN_FILE)
    return run


def repeat_settings(original: Run) -> TrainSettings:
    """Return the settings that repeat a finished run step by step. Raises CheckpointError if it hasn't finished."""
    events = [entry["event"] for entry in read_log_entries(original.log_file)]
    if "finished" not in events:
        raise CheckpointError(f"{original.path} hasn't finished", original.resume_command)
    return replace(original.settings, steps=events.count("step"), time_limit=None, repeat_plan=REPEAT_PLAN_FILE)


def read_repeat_plan(run: Run) -> tuple[list[float], frozenset[int]]:
    """Return the learning rates of the steps of a run that `repeat_run` made, and the steps with a validation.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = run.path / REPEAT_PLAN_FILE
    entries = list(read_log_entries(path))
    rates = [number(entry.get("learning_rate")) for entry in entries if entry["event"] == "step"]
    validations = frozenset(entry.get("step", 0) for entry in entries if entry["event"] == "validation")
    if len(rates) != run.settings.steps or not all(rate >= 0 for rate in rates):
        raise ConfigError(f"{path} is damaged", "the file that mlxlm pretrain --repeat wrote, or a new run")
    return rates, validations


def _write_run_file(folder: Path, settings: TrainSettings, data: str, digest: str) -> None:
    write_json(folder / RUN_FILE, {"settings": settings.to_dict(), "data": data, "data_digest": digest})


def _digest(data: Path) -> str:
    """Return the SHA-256 of the manifest, which has the digests of the shards. Raises DataError without one."""
    with os_errors_as(DataError, "read", data / MANIFEST_FILE):
        if not is_prepared(data):
            raise DataError(f"{data} is not a prepared dataset: it has no {MANIFEST_FILE}", "the folder that has it")
        return hashlib.sha256((data / MANIFEST_FILE).read_bytes()).hexdigest()
