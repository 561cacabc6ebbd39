"""Read and write `config.json`, and the presets that ship with mlxlm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.validation import is_unused_id
from mlxlm.families.config_conversion import canonical, huggingface, resolve_model_type
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource


def config_from_hf(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Translate a Hugging Face configuration to a ModelConfig. Fields that don't concern a decoder are dropped.

    Args:
        values: The parsed `config.json`.
        source: What error messages call it.

    Raises:
        ConfigError: A required field is missing, a size is impossible, or the configuration needs a feature that the
            decoder doesn't implement (see `mlxlm.families.unsupported`).
    """
    chosen = _without_unused_ids(canonical(values, source))
    try:
        return ModelConfig(**chosen)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", error.hint) from None


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The complete `config.json` of a model, in the names of the architecture that can express it.

    See `resolve_model_type`. Every field is written, so that other tools don't fall back to defaults of their own.
    """
    return huggingface(resolve_model_type(config))


def load_config(path: Path | str) -> ModelConfig:
    """Read `config.json` from a file or a model folder."""
    return config_from_hf(read_json(path), source=str(path))


def load_preset(name: str, **changes: Any) -> ModelConfig:
    """A configuration that ships with mlxlm, e.g. `load_preset("5m", vocab_size=4096)`.

    Raises:
        ConfigError: There is no preset of this name.
    """
    known = preset_names()
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}", "one of " + ", ".join(known))
    path = resource("models", "presets", f"{name}.json")
    return config_from_hf({**read_json(path), **changes}, source=f"preset {name}")


def preset_names() -> list[str]:
    """The names of all presets, from the smallest model to the largest."""
    paths = list(resource("models", "presets").glob("*.json"))
    return [p.stem for p in sorted(paths, key=lambda p: config_from_hf(read_json(p)).parameter_count())]


def _without_unused_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out ids of BOS and EOS that are no tokens of the model: transformers saves GPT-2's 50256 for vocabularies
    of any size, and fine-tuned models may name a token for which the embedding has no row. No text has them."""
    size, result = values.get("vocab_size"), dict(values)

    for name in ("bos_token_id", "eos_token_id"):
        value = values.get(name)
        if is_unused_id(value, size):
            result[name] = None
        elif isinstance(value, list) and any(is_unused_id(id, size) for id in value):
            result[name] = [id for id in value if not is_unused_id(id, size)] or None
    return result
