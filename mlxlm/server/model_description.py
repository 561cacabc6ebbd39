"""What is known of a model without loading it: what the file system and its headers say, kept for the next start."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlxlm
from mlxlm.backend import platform
from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU
from mlxlm.checkpoint import AnyCheckpoint, Checkpoint, open_checkpoint
from mlxlm.checkpoint.embedding_config import MODULES_FILE, EmbeddingConfig
from mlxlm.checkpoint.load import weights_memory
from mlxlm.checkpoint.local_models import LocalModel
from mlxlm.checkpoint.locations import locate
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.families import get_quantization_config
from mlxlm.generation import GenerationConfig
from mlxlm.tokenizer import FillInTheMiddle, Tokenizer
from mlxlm.utils.errors import CheckpointError, MlxlmError, TokenizerError
from mlxlm.utils.json_files import read_json_object, write_json

logger = logging.getLogger("mlxlm.server")

_MAX_KEPT = 500  # models; a chat template has up to 20,000 bytes
_MAX_BYTES = 32 << 20  # of the file

Facts = dict[str, Any]  # attributes of a description, as JSON values


@dataclass(frozen=True)
class ModelDescription:
    """What is known of a model without loading it.

    Attributes:
        name: Its name in requests.
        path: Its file or folder.
        location: Whose folder it is in, see `LocalModel`.
        bytes: Size of its files.
        memory: Bytes of its weights when it is loaded.
        modified: When they were changed last.
        digest: 64 hexadecimal digits that change with the files.
        format: "safetensors", "pytorch", "gguf" or "llama2.c".
        family: Its `model_type`, such as "qwen3".
        parameters: Number of parameters.
        quantization: "4bit" for MLX's, else the type of most of the weights, such as "Q4_K" or "BF16".
        context_length: Tokens.
        example_prompt: A prompt that shows what it can do, see `GenerationConfig`.
        is_embedding_model: Whether it was made for embeddings.
        problem: Why it can't be opened, and the attributes from `format` on are missing; None if it can.
        chat_template: Its chat template; read by `describe` with `with_tokenizer`, like the next attribute.
        fills_in_the_middle: Whether its tokenizer has the tokens for fill-in-the-middle.
        loaded: Whether it is in memory.
    """

    name: str
    path: Path
    location: str
    bytes: int
    memory: int
    modified: datetime
    digest: str
    format: str | None = None
    family: str | None = None
    parameters: int | None = None
    quantization: str | None = None
    context_length: int | None = None
    example_prompt: str | None = None
    is_embedding_model: bool = False
    problem: str | None = None
    chat_template: str | None = None
    fills_in_the_middle: bool = False
    loaded: bool = False


class Descriptions:
    """Describes models. What their files say is read once, and again when they change."""

    def __init__(self) -> None:
        self._facts: dict[str, Facts] | None = None  # by the digest of a model
        self._lock = threading.Lock()
        self._changed = False

    def describe(self, name: str, model: LocalModel, with_tokenizer: bool = False) -> ModelDescription:
        """Describe a model.

        Args:
            name: Its name in requests.
            model: Where it is.
            with_tokenizer: Read its tokenizer, too, which takes longer.
        """
        description = _describe_files(name, model)
        with self._lock:
            if self._facts is None:
                self._facts = _read_kept()
            facts = self._facts.get(description.digest)
            if facts is None or with_tokenizer and not {"problem", "fills_in_the_middle"} & set(facts):
                facts = self._facts[description.digest] = _read_facts(description, with_tokenizer)
                self._changed = True
        return replace(description, **facts)

    def save(self) -> None:
        """Keep what was read for the next start. A model that can't be opened is tried again then."""
        with self._lock:
            if self._changed and self._facts is not None:
                self._changed = False
                kept = [(digest, facts) for digest, facts in self._facts.items() if "problem" not in facts]
                with suppress(MlxlmError, OSError):  # of a home folder that can't be written
                    _kept_file().parent.mkdir(parents=True, exist_ok=True)
                    write_json(_kept_file(), {"read_by": _read_by(), "models": dict(kept[-_MAX_KEPT:])})


def _kept_file() -> Path:
    return platform.cache_folder() / "models.json"


def _read_by() -> list[Any]:
    """What the facts depend on besides the files."""
    return [mlxlm.__version__, ON_CPU, platform.total_memory()]


def _read_kept() -> dict[str, Facts]:
    with suppress(MlxlmError):
        kept = read_json_object(_kept_file(), _MAX_BYTES, CheckpointError)
        names, models = {field.name for field in fields(ModelDescription)}, kept.get("models")
        if kept.get("read_by") == _read_by() and isinstance(models, dict):
            return {
                digest: facts for digest, facts in models.items() if isinstance(facts, dict) and set(facts) <= names
            }
    return {}


def _describe_files(name: str, model: LocalModel) -> ModelDescription:
    """What the file system says of a model."""
    path, times = model.path, [0.0]
    with suppress(MlxlmError, OSError):
        path = locate(path).weights if path.is_dir() else path
        times += [file.stat().st_mtime for file in (path.iterdir() if path.is_dir() else [path])]
    resolved = path.resolve()
    digest = resolved.name.removeprefix("sha256-")
    # Hugging Face's cache has large files under their digest, and so has ollama all.
    if len(digest) != 64 or resolved.parent.name != "blobs":
        digest = hashlib.sha256(repr((str(path), model.bytes, times)).encode()).hexdigest()
    modified = datetime.fromtimestamp(max(times), UTC)
    return ModelDescription(name, path, model.location, model.bytes, model.bytes, modified, digest)


def _read_facts(description: ModelDescription, with_tokenizer: bool) -> Facts:
    try:
        checkpoint = open_checkpoint(description.path)
        facts = _header_facts(description.path, checkpoint)
    except (MlxlmError, OSError) as error:
        return {"problem": str(error)}
    except Exception as error:  # whatever is wrong with its files, the other models can be listed
        logger.exception("%s can't be described", description.name)
        return {"problem": describe_error(error)}
    if with_tokenizer:
        try:
            facts |= tokenizer_facts(checkpoint.load_tokenizer())
        except MlxlmError:  # reported when it is loaded
            facts |= {"fills_in_the_middle": False}
    return facts


def _header_facts(path: Path, checkpoint: AnyCheckpoint) -> Facts:
    values = checkpoint.hf_config
    if isinstance(checkpoint, Checkpoint):
        quantization: Any = checkpoint.config.quantization
        context: Any = checkpoint.config.max_position_embeddings
    else:
        quantization, context = get_quantization_config(values), values.get("max_position_embeddings")
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.stored_dtype] = sizes.get(tensor.stored_dtype, 0) + tensor.nbytes
    parameters = sum(math.prod(tensor.shape) for tensor in dequantized_tensors(checkpoint).values())
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    return {
        "format": checkpoint.format,
        "family": str(values.get("model_type", "unnamed")),
        "parameters": parameters,
        "memory": weights_memory(checkpoint, parameters),
        "quantization": f"{bits}bit" if bits else max(sizes, key=lambda name: sizes[name], default=None),
        "context_length": context if isinstance(context, int) else None,
        "example_prompt": GenerationConfig.read(path).example_prompt,
        "is_embedding_model": checkpoint.embedding != EmbeddingConfig() or (path / MODULES_FILE).exists(),
    }


def tokenizer_facts(tokenizer: Tokenizer) -> Facts:
    """What the tokenizer says about a model."""
    facts: Facts = {"chat_template": tokenizer.chat_template, "fills_in_the_middle": True}
    try:
        FillInTheMiddle(tokenizer)
    except TokenizerError:
        facts["fills_in_the_middle"] = False
    return facts
