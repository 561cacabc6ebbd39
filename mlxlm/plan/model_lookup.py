"""The configuration that a name stands for, found without any weights."""

from __future__ import annotations

from pathlib import Path

from mlxlm.config import ModelConfig
from mlxlm.families import config_from_hf, load_config, load_preset, preset_names
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource


def reference_names() -> list[str]:
    """Published models whose configurations ship with mlxlm, to plan with: there are no weights."""
    return sorted(path.stem for path in resource("models", "reference").glob("*.json"))


def find_config(source: ModelConfig | Path | str) -> ModelConfig:
    """The configuration of a preset ("5m"), a published model ("llama-7b"), a `config.json`, a model folder, a run, a
    GGUF or llama2.c file, or a hub id, of which its `config.json` alone is fetched.

    A path that exists wins over a hub id, a preset over both. Raises ConfigError or CheckpointError.
    """
    if isinstance(source, ModelConfig):
        return source
    name, path = str(source), Path(source)
    if name in preset_names():
        return load_preset(name)
    if name in reference_names():
        return load_config(resource("models", "reference", f"{name}.json"))
    if path.is_file() and path.suffix == ".json":
        return load_config(path)
    root = _root(path)
    if (root / "config.json").is_file():
        return config_from_hf(read_json(root), source=str(root / "config.json"))
    from mlxlm.checkpoint import hub
    from mlxlm.checkpoint.open import open_checkpoint

    if not path.exists():
        if not hub.is_id(name):
            known = [*preset_names(), *reference_names()]
            raise ConfigError(f"there is no model {name!r}", f"a path, a hub id, or one of {', '.join(known)}")
        return load_config(hub.download_config(name))
    checkpoint = open_checkpoint(path)
    if checkpoint.config is None:
        raise ConfigError(
            f"{name}: this decoder has no {checkpoint.unsupported_reason}", "a model of one of mlxlm's families"
        )
    return checkpoint.config


def _root(path: Path) -> Path:
    """The folder with config.json: of a run, for one of its checkpoints."""
    from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder

    runs = path.absolute().parents[1:2] if checkpoint_step(path) >= 0 else ()
    return next((run for run in runs if is_run_folder(run)), path)
