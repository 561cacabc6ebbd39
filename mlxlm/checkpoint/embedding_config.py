"""How a checkpoint turns hidden states into the embedding of a text: the files of sentence-transformers, GGUF's key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json, read_json_object

MODULES_FILE = "modules.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
_MAX_BYTES = 1 << 20

Pooling = Literal["mean", "last"]
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
# llama.cpp's `pooling_type`, None for a file without it; 2 is that of encoders.
_GGUF_POOLINGS: dict[str, Pooling] = {"None": "mean", "0": "mean", "1": "mean", "3": "last"}


@dataclass(frozen=True)
class EmbeddingConfig:
    """How the embedding of a text follows from the hidden states of its tokens.

    Attributes:
        pooling: "mean" of all tokens, or the "last" one.
        prompts: Texts to put before a text, by their names ("query").
        default_prompt: The name of the one that is used by default.
        unsupported: What the checkpoint needs and mlxlm lacks, such as another pooling; None for nothing.
    """

    pooling: Pooling = "mean"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    unsupported: str | None = None


def read_folder(folder: Path, hf_config: Mapping[str, Any]) -> EmbeddingConfig:
    """Read the files of sentence-transformers in a model folder, if there are any.

    Args:
        folder: The folder.
        hf_config: Its config.json.

    Raises:
        ConfigError: A file can't be read; the message names the file and the field.
    """
    unsupported = None
    if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention"):
        unsupported = "attention to later tokens"
    pooling: Pooling = "mean"
    file = folder / MODULES_FILE
    if file.exists():
        modules = read_json(file, _MAX_BYTES, ConfigError)
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise ConfigError(f"{file} is not a list of modules")
        for module in modules:
            kind = str(module.get("type")).rpartition(".")[2]
            if kind == "Pooling":
                path = folder / Path(str(module.get("path"))).name / "config.json"
                found = _pooling(read_json_object(path, _MAX_BYTES, ConfigError))
                if found in _POOLINGS:
                    pooling = _POOLINGS[found]
                else:
                    unsupported = f"the pooling {found!r}"
            elif kind not in ("Transformer", "Normalize"):
                unsupported = f"the module {kind!r}"
    file = folder / _PROMPTS_FILE
    values = read_json_object(file, _MAX_BYTES, ConfigError) if file.exists() else {}
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ConfigError(f"{file}: prompts is not an object of texts", '{"query": "Query: "}')
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: default_prompt_name is {default!r:.60}", "one of " + ", ".join(prompts))
    return EmbeddingConfig(pooling, prompts, default, unsupported)


def from_gguf(pooling_type: Any) -> EmbeddingConfig:
    """From llama.cpp's key `pooling_type`, None if a file hasn't it."""
    if (pooling := _GGUF_POOLINGS.get(str(pooling_type))) is not None:
        return EmbeddingConfig(pooling)
    return EmbeddingConfig(unsupported=f"the pooling type {pooling_type!r:.40} of GGUF")


def _pooling(values: Mapping[str, Any]) -> str:
    """The pooling of a `1_Pooling/config.json`: a name in newer files, one flag for each in older ones."""
    named = values.get("pooling_mode")
    modes = [named] if named else [key.removeprefix("pooling_mode_") for key, value in values.items() if value is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if values.get("include_prompt") is False:
        modes.append("without the prompt")
    return " and ".join(map(str, modes))
