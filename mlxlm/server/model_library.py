"""The models that a server can load: their names, and where they are."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mlxlm.checkpoint.catalog import catalog
from mlxlm.checkpoint.download import find
from mlxlm.checkpoint.local_models import GIVEN, LocalModel, all_models, folder_size
from mlxlm.server.model_description import Descriptions, ModelDescription
from mlxlm.utils.errors import ConfigError, MlxlmError

ANY = "*"  # the alias of every name that isn't a model's


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
        self._targets = {_key(alias): name for alias, name in self._aliases.items()}
        self._models = {name: _given(name, source) for name, source in given.items()}
        self._ids: dict[str, str] = {}  # lower case, with all ways to write a name -> name
        self._descriptions = Descriptions()
        self._index({})

    @property
    def names(self) -> list[str]:
        """The names of the models, then the aliases that have a model."""
        aliases = [alias for alias in self._aliases if alias != ANY and self.find(alias)]
        return [*self._models, *aliases]

    @property
    def any_name(self) -> str | None:
        """The model that all unknown names stand for, if there is one."""
        return self.find(ANY) if ANY in self._targets else None

    def check_aliases(self) -> None:
        """Raise ConfigError for an alias of a model that isn't here."""
        for alias, name in self._aliases.items():
            if self.find(alias) is None:
                problem = f"--alias {alias}={name}: there is no model {name!r}"
                raise ConfigError(problem, ", ".join(self.closest(name)))

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
        self._models = models  # at once: other threads read it
        self._index(others)

    def find(self, name: str) -> str | None:
        """The model that a name stands for, in upper or lower case, with or without its owner or `:latest`; or None."""
        name = self._targets.get(_key(name), name)
        found = name if name in self._models else self._ids.get(name.lower(), "")
        model = self._models.get(found)
        return found if model and (not self.serves_all or os.path.exists(model.path)) else None

    def first(self) -> str:
        """The first model that can be opened, or else the first one."""
        names = list(self._models)
        if not self.serves_all:
            return names[0]
        return next((name for name in names if self.describe(name).problem is None), names[0])

    def add_alias(self, alias: str, name: str) -> None:
        """Give a model another name. Raises ConfigError if a model has it already."""
        key = _key(alias)
        if key in ("", ANY, *self._ids, *self._targets):
            raise ConfigError(f"{alias!r:.100} can't be another name of a model", "a name that no model has")
        self._aliases[alias] = self._targets[key] = name

    def remove_alias(self, alias: str) -> bool:
        """Take another name from a model, and return whether it was one."""
        key = _key(alias)
        self._aliases = {other: name for other, name in self._aliases.items() if _key(other) != key}
        return self._targets.pop(key, None) is not None

    def source(self, name: str) -> str:
        """What to load a model from: a path, or a name of the catalog, which has defaults for some models."""
        model = self._models[name]
        return model.name if model.location == GIVEN or model.name in catalog() else str(model.path)

    def closest(self, name: str) -> list[str]:
        """The names that were probably meant, the best first."""
        keys = difflib.get_close_matches(name.lower(), self._ids, n=5, cutoff=0.5)
        return list(dict.fromkeys(self._ids[key] for key in keys))[:3]

    def describe(self, name: str, with_tokenizer: bool = False) -> ModelDescription:
        """What is known of a model, see `Descriptions.describe`."""
        description = self._descriptions.describe(name, self._models[name], with_tokenizer)
        self._descriptions.save()
        return description

    def describe_all(self) -> list[tuple[str, ModelDescription]]:
        """`names` and their descriptions, with models that came and without those that went."""
        self.refresh()
        models, describe = self._models, self._descriptions.describe
        found = [(name, self.find(name) or "") for name in self.names]
        described = [(name, describe(model, models[model])) for name, model in found if model in models]
        self._descriptions.save()
        return described

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
