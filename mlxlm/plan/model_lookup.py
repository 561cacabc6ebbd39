"""Find the configuration of a model by its name, without its weights."""

from __future__ import annotations

from pathlib import Path

from mlxlm.config import ModelConfig
from mlxlm.families import config_from_hf, load_config, load_preset, preset_names
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource


def reference_names() -> list[str]:
    """List the published models whose configurations ship with mlxlm, without weights."""
    return sorted(path.stem for path in resource("models", "reference").glob("*.json"))


def find_config(source: ModelConfig | Path | str) -> ModelConfig:
    """Find the configuration of a model.

    Args:
        source: A preset ("5m"), a published model ("llama-7b"), a `config.json`, a model folder, a run, a GGUF or
            llama2.c file, or a hub id, of which only `config.json` is downloaded. A preset takes precedence over a
            path, and an existing path over a hub id.

    Raises:
        ConfigError: There is no such model, or mlxlm doesn't implement it.
        CheckpointError: The model can't be read.
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
    from mlxlm.checkpoint.open import open_decoder_checkpoint

    if not path.exists():
        if not hub.is_id(name):
            known = [*preset_names(), *reference_names()]
            raise ConfigError(f"there is no model {name!r}", f"a path, a hub id, or one of {', '.join(known)}")
        return load_config(hub.download_config(name))
    return open_decoder_checkpoint(path, "planned").config


def _root(path: Path) -> Path:
    """Return the folder with config.json: the run's, for one of its checkpoints."""
    from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder

    run = path.absolute().parents[1] if checkpoint_step(path) >= 0 else path
    return run if is_run_folder(run) else path
