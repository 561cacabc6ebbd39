"""What makes several runs comparable: the same data and tokenizer, made once, and a folder that can be gone on with."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.data import DataOptions, Manifest
from mlxlm.data.sources import unseekable_source
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.run import Run
from mlxlm.train.run_data import (
    Phase,
    TokenizerOptions,
    check_tokenizer,
    existing_tokenizer,
    no_phase,
    prepare_shards,
    prepared_source,
    train_tokenizer,
)
from mlxlm.train.start import start_run
from mlxlm.utils.errors import ConfigError, DataError


def saved_args(sources: Sequence[str | Path], **arguments: Any) -> dict[str, Any]:
    """What was asked for, as JSON will have it when it is read back; paths are absolute.

    Raises DataError for stdin and pipes, which can't be read again.
    """
    if (once := unseekable_source(sources)) is not None:
        raise DataError(f"{once} can be read only once, and a folder of runs can be continued", "a file")
    lists = {"sources": sources, "validation": arguments.get("validation", ())}
    if arguments.get("tokenizer") is not None:
        arguments["tokenizer"] = str(Path(arguments["tokenizer"]).resolve())
    paths = {name: [str(Path(path).resolve()) for path in found] for name, found in lists.items()}
    return json.loads(json.dumps({**arguments, **paths}))


def check_saved_args(out: Path, there: Mapping[str, Any], now: Mapping[str, Any], what: str, command: str) -> None:
    """Raise ConfigError where `out` was begun with other arguments."""
    if changed := [name for name, value in now.items() if there.get(name) != value]:
        hint = f"{command} --out {shlex.quote(str(out))} to go on with it, or another --out"
        raise ConfigError(f"{out} is a {what} with other {', '.join(changed)}", hint)


def prepare_shared_data(
    folder: Path,
    sources: Sequence[str | Path],
    vocab_size: int | None,
    *,
    exact: bool,
    tokenizer: str | Path | None,
    tokenizer_type: str,
    text_column: str | None,
    weights: Sequence[float] | None,
    validation: Sequence[str | Path],
    validation_fraction: float,
    on_bad_input: str,
    seed: int,
    phase: Phase,
) -> tuple[Tokenizer, Path]:
    """The tokenizer, and where the shards are: in `folder`/data, unless `sources` is prepared data. Arguments as of
    `start_run`; `exact`: see `mlxlm.tokenizer.train`."""
    prepared = prepared_source(sources)
    data = DataOptions(
        sources,
        weights=weights,
        text_column=text_column,
        validation=validation,
        validation_fraction=validation_fraction,
        on_bad_input=on_bad_input,
    )
    options = TokenizerOptions(tokenizer, tokenizer_type, vocab_size if exact else None)
    loaded_tokenizer = existing_tokenizer(options, prepared) or train_tokenizer(data, options, vocab_size, seed, phase)
    if prepared:
        check_tokenizer(Manifest.read(prepared), loaded_tokenizer, prepared)
        return loaded_tokenizer, prepared.resolve()
    return loaded_tokenizer, prepare_shards(data, loaded_tokenizer, folder / "data", seed, phase)


def relative_data_path(data: Path, folder: Path) -> str:
    """Where the shards are, as a file in `folder` says it: what lies inside goes with the folder."""
    return data.name if data.parent == folder else str(data)


def open_or_start_run(
    path: Path, data: Path, config: ModelConfig, settings: dict[str, Any], phase: Phase = no_phase
) -> Run:
    """The run at `path`, made if it isn't there yet."""
    gc.collect()  # the run before is held by cycles: its bytes would count as this one's
    mx.clear_cache()
    return Run.open(path) if is_run_folder(path) else start_run(path, [data], config, settings=settings, phase=phase)


def is_finished(run: Run) -> bool:
    """Whether its last step is saved."""
    checkpoints = run.checkpoints()
    return bool(checkpoints) and checkpoint_step(checkpoints[-1]) == run.settings.steps
