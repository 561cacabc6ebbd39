"""The models that a server can load: their names, where they are, and what is known of them without loading them."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import ON_CPU
from mlxlm.backend.platform import total_memory
from mlxlm.checkpoint import AnyCheckpoint, Checkpoint, open_checkpoint
from mlxlm.checkpoint.catalog import catalog
from mlxlm.checkpoint.download import find
from mlxlm.checkpoint.load import fits_float32
from mlxlm.checkpoint.local_models import GIVEN, LocalModel, all_models, folder_size
from mlxlm.checkpoint.locations import locate
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.families import get_quantization_config
from mlxlm.utils.errors import ConfigError, MlxlmError

ANY = "*"  # the alias of every name that isn't a model's


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
        problem: Why it can't be opened, and the six attributes before are None; None if it can.
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
    problem: str | None = None
    loaded: bool = False


class ModelLibrary:
    """The models that a server can load.

    Args:
        given: {name: path, name of the catalog, or hub id}. Empty for all models on this machine.
        folders: Folders with further models; see `folder_models`.
        aliases: {another name: name of a model}. `ANY` stands for all unknown names.
    """

    def __init__(
        self, given: Mapping[str, str], folders: Sequence[Path] = (), aliases: Mapping[str, str] | None = None
    ):
        self.serves_all, self._folders = not given, folders
        self._aliases = dict(aliases or {})
        self._targets = {_key(alias): name.lower() for alias, name in self._aliases.items()}
        self._models = {name: _given(name, source) for name, source in given.items()}
        self._ids: dict[str, str] = {}  # lower case, with all ways to write a name -> name
        self._descriptions: dict[str, ModelDescription] = {}
        self._index({})

    @property
    def names(self) -> list[str]:
        """The names of the models, then the aliases that have a model."""
        aliases = [alias for alias in self._aliases if alias != ANY and self.find(alias)]
        return [*self._models, *aliases]

    def refresh(self) -> None:
        """Look for models that came or went, unless the command line names the models."""
        if not self.serves_all:
            return
        names: dict[Path, str] = {}
        others: dict[str, str] = {}
        models: dict[str, LocalModel] = {}
        for model in all_models(self._folders):
            name = model.id or model.name
            first = names.setdefault(model.path.resolve(), name)
            if first == name:
                models.setdefault(name, model)  # of two with the same name, the first
            else:
                others[name] = first
        self._models = models  # at once: `describe` may run in another thread
        self._index(others)

    def find(self, name: str) -> str | None:
        """The model that a name stands for, in upper or lower case, with or without its owner or `:latest`; or None."""
        if (target := self._targets.get(_key(name))) is not None:
            return self._ids.get(target)
        return self._ids.get(name.lower()) or self._ids.get(self._targets.get(ANY, ""))

    def add_alias(self, alias: str, name: str) -> None:
        """Give a model another name. Raises ConfigError if a model has it already."""
        key = _key(alias)
        if key in ("", ANY, *self._ids, *self._targets):
            raise ConfigError(f"{alias!r:.100} can't be another name of a model", "a name that no model has")
        self._aliases[alias], self._targets[key] = name, name.lower()

    def remove_alias(self, alias: str) -> bool:
        """Take another name from a model, and return whether it was one."""
        key = _key(alias)
        self._aliases = {other: name for other, name in self._aliases.items() if _key(other) != key}
        return self._targets.pop(key, None) is not None

    def source(self, name: str) -> str:
        """What to load a model from: a path, or a name of the catalog, which has defaults for some models."""
        model = self._models[name]
        return model.name if model.location == GIVEN or model.name in catalog() else str(model.path)

    def exists(self, name: str) -> bool:
        """Whether a model is still there."""
        return name in self._models and (not self.serves_all or self._models[name].path.exists())

    def closest(self, name: str) -> list[str]:
        """The names that were probably meant, the best first."""
        keys = difflib.get_close_matches(name.lower(), self._ids, n=5, cutoff=0.5)
        return list(dict.fromkeys(self._ids[key] for key in keys))[:3]

    def describe(self, name: str) -> ModelDescription:
        """What is known of a model. Its headers are read once, and again when its files change."""
        model = self._models[name]
        description = _files(name, model)
        known = self._descriptions.get(name)
        if known is None or known.digest != description.digest:
            try:
                known = _with_headers(description, open_checkpoint(model.path))
            except (MlxlmError, OSError) as error:
                known = replace(description, problem=str(error))
            self._descriptions[name] = known
        return known

    def _index(self, others: Mapping[str, str]) -> None:
        """Collect the ways to write the names. `others` are additional names of models."""
        ids = {name.lower(): name for name in self._models}
        for other, name in [*others.items(), *((name, name) for name in self._models)]:
            for form in (other.removesuffix(":latest"), self._models[name].name, other.rpartition("/")[2]):
                ids.setdefault(form.lower(), name)
                ids.setdefault(f"{form}:latest".lower(), name)
        self._ids = ids


def _key(alias: str) -> str:
    return alias.lower().removesuffix(":latest")


def _given(name: str, source: str) -> LocalModel:
    """A model that the command line names. It may be downloaded later, or be no model at all."""
    path = None
    with suppress(MlxlmError):  # reported where it is loaded
        path = find(source)
    path = path or Path(source)
    return LocalModel(source, path, folder_size(path) if path.exists() else 0, GIVEN, name)


def _files(name: str, model: LocalModel) -> ModelDescription:
    """What the file system says of a model."""
    path, times = model.path, [0.0]
    with suppress(MlxlmError, OSError):
        path = locate(path).weights if path.is_dir() else path
        times += [file.stat().st_mtime for file in (path.iterdir() if path.is_dir() else [path])]
    digest = path.resolve().name.removeprefix("sha256-")  # ollama's files, and large ones of Hugging Face's cache
    if len(digest) != 64:
        digest = hashlib.sha256(repr((str(path), model.bytes, times)).encode()).hexdigest()
    return ModelDescription(
        name, path, model.location, model.bytes, model.bytes, datetime.fromtimestamp(max(times), UTC), digest
    )


def _with_headers(description: ModelDescription, checkpoint: AnyCheckpoint) -> ModelDescription:
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
    widened = ON_CPU and (not isinstance(checkpoint, Checkpoint) or fits_float32(checkpoint.config, total_memory()))
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    return replace(
        description,
        format=checkpoint.format,
        family=str(values.get("model_type", "unnamed")),
        parameters=parameters,
        memory=4 * parameters if widened else sum(sizes.values()),
        quantization=f"{bits}bit" if bits else max(sizes, key=lambda name: sizes[name], default=None),
        context_length=context if isinstance(context, int) else None,
    )
