"""What makes several runs comparable: a folder of runs that share their data, tokenizer and settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mlxlm.backend.mlx import free_memory
from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.data import DataOptions, Manifest
from mlxlm.data.manifest import prepared_source
from mlxlm.data.sources import unseekable_source
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions
from mlxlm.train.start import (
    Phase,
    check_tokenizer,
    existing_tokenizer,
    no_phase,
    prepare_shards,
    start_run,
    train_tokenizer,
)
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.json_files import read_json, write_json


@dataclass(frozen=True)
class RunGroup(ABC):
    """A folder of runs on the same data: a JSON file that describes it, `data/` (unless it was prepared before), runs.

    Attributes:
        path: The folder.
        settings: Fields of `TrainSettings` that all runs share.
        data: Folder of the token shards.
    """

    path: Path
    settings: dict[str, Any]
    data: Path

    KIND: ClassVar[str]  # in error messages
    FILE: ClassVar[str]
    COMMAND: ClassVar[str]

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing group.

        Raises:
            ConfigError: The folder has no `FILE`, or it is damaged.
        """
        path = Path(path)
        file = path / cls.FILE
        if not file.is_file():
            raise ConfigError(f"{path} is not a {cls.KIND}: it has no {cls.FILE}", f"the --out of {cls.COMMAND}")
        values = read_json(file)
        try:
            return cls(
                path=path,
                settings=dict(values["settings"]),
                data=path / values["data"],
                **cls.parse_fields(values, file),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{file} is damaged: a field is missing or invalid") from None

    @classmethod
    @abstractmethod
    def parse_fields(cls, values: Mapping[str, Any], file: Path) -> dict[str, Any]:
        """Return the fields that the subclass adds, from the contents of `file`.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: A key is missing or invalid.
            ConfigError: A value can't work; the message names `file`.
        """

    @classmethod
    def write(cls, folder: Path, shards: Path, **fields: Any) -> None:
        """Write the file that describes a new group. A path of `shards` inside `folder` is relative."""
        write_json(folder / cls.FILE, {**fields, "data": shards.name if shards.parent == folder else str(shards)})

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all runs."""
        return load(self.data / "tokenizer")

    def open_or_start_run(
        self, name: str, config: ModelConfig, settings: Mapping[str, Any], phase: Phase = no_phase
    ) -> Run:
        """Open the run in the subfolder `name`, or make it.

        Args:
            name: The subfolder.
            config: The model.
            settings: Fields of `TrainSettings` of this run, which extend or replace the shared ones.
            phase: See `start_run`.
        """
        free_memory()  # of the previous run, which would count as this one's
        path = self.path / name
        if is_run_folder(path):
            return Run.open(path)
        return start_run(path, [self.data], config, settings={**self.settings, **settings}, phase=phase)


def prepare_shared_data(
    folder: Path, data: DataOptions, tokenizer: TokenizerOptions, vocab_size: int, *, seed: int, phase: Phase
) -> tuple[Tokenizer, Path]:
    """Prepare the tokenizer and the token shards of all runs.

    Args:
        folder: Where to write the shards, into `data/`, unless `data` is prepared already.
        data: The text, or one folder of prepared data.
        tokenizer: The tokenizer.
        vocab_size: Vocabulary size to train if `tokenizer` has none; reduced if the text doesn't support it.
        seed: Of the split and the order of the text.
        phase: See `start_run`.

    Returns:
        The tokenizer, and the folder of the shards.

    Raises:
        DataError: A source is stdin or a pipe, which can't be read twice.
    """
    if (source := unseekable_source(data.sources)) is not None:
        raise DataError(f"{source} can be read only once", "a file")
    prepared = prepared_source(data.sources)
    loaded = existing_tokenizer(tokenizer, prepared)
    if loaded is None:
        loaded = train_tokenizer(data, tokenizer, tokenizer.vocab_size or vocab_size, seed, phase)
    if prepared:
        check_tokenizer(Manifest.read(prepared), loaded, prepared)
        return loaded, prepared.resolve()
    return loaded, prepare_shards(data, loaded, folder / "data", seed, phase)


def is_finished(run: Run) -> bool:
    """Return whether the last step of the run is saved."""
    checkpoints = run.checkpoints()
    return bool(checkpoints) and checkpoint_step(checkpoints[-1]) == run.settings.steps
