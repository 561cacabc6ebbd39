"""Load `config.json` files and the presets that ship with mlxlm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.config_conversion import config_from_hf
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource


def load_config(path: Path | str) -> ModelConfig:
    """Read a `config.json`, or the one in a model folder."""
    return config_from_hf(read_json(path), source=str(path))


def load_preset(name: str, **changes: Any) -> ModelConfig:
    """A configuration that ships with mlxlm, such as `load_preset("5m", vocab_size=4096)`.

    Args:
        name: One of `preset_names()`.
        changes: Other values for fields of its `config.json`.

    Raises:
        ConfigError: There is no such preset.
    """
    presets = preset_names()
    if name not in presets:
        raise ConfigError(f"there is no preset {name!r}", "one of " + ", ".join(presets))
    values = read_json(resource("models", "presets", f"{name}.json"))
    return config_from_hf({**values, **changes}, source=f"preset {name}")


def preset_names() -> list[str]:
    """The names of all presets, by increasing number of parameters."""
    configs = {path.stem: load_config(path) for path in resource("models", "presets").glob("*.json")}
    return sorted(configs, key=lambda name: configs[name].parameter_count())
