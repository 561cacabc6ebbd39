"""Find the configuration of a model by its name, without its weights."""

from __future__ import annotations

from pathlib import Path

from mlxlm.config import ModelConfig
from mlxlm.families import config_from_hf, load_config, load_preset, preset_names
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.resources import resource


def reference_names() -> list[str]:
    """List the published models whose configurations ship with mlxlm, without weights."""
    return sorted(path.stem for path in resource("models", "reference").glob("*.json"))


def find_config(source: ModelConfig | Path | str) -> ModelConfig:
    """Find the configuration of a model.

    Args:
        source: A preset ("5m"), a published model ("llama-7b"), a `config.json`, a model folder, a run, a GGUF or
            llama2.c file, a name of the catalog, for which nothing is downloaded, or a hub id, of which only
            `config.json` is downloaded. A preset takes precedence over a path, and an existing path over other names.

    Raises:
        ConfigError: There is no such model, or mlxlm doesn't implement it.
        CheckpointError: The model can't be read.
    """
    if isinstance(source, ModelConfig):
        return source
    from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder

    name, path = str(source), Path(source)
    if name in preset_names():
        return load_preset(name)
    if name in reference_names():
        return load_config(resource("models", "reference", f"{name}.json"))
    if path.is_file() and path.suffix == ".json":
        return load_config(path)
    run = path.absolute().parents[1] if checkpoint_step(path) >= 0 else path
    root = run if is_run_folder(run) else path  # one of its checkpoints has no config.json
    if (root / "config.json").is_file():
        return load_config(root / "config.json")
    from mlxlm.checkpoint import hub
    from mlxlm.checkpoint.download import find, find_catalog_entry, no_such_model
    from mlxlm.checkpoint.open import open_decoder_checkpoint

    if (entry := find_catalog_entry(name)) is not None:
        return config_from_hf(entry.config, source=f"the catalog's {name}")
    if (found := find(source)) is None:
        if hub.is_id(name):
            return load_config(hub.download_config(name))
        known = ", ".join([*preset_names(), *reference_names()])
        error = no_such_model(name)
        raise ConfigError(error.message, f"{error.hint}; or one of {known}")
    if (found / "config.json").is_file():
        return load_config(found)
    checkpoint = open_decoder_checkpoint(found, "planned")
    return (checkpoint.packed or checkpoint).config
