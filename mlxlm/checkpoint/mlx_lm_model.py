"""mlx_lm's model of an architecture that mlxlm doesn't implement, built from config.json without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import linecache
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from mlxlm.backend.mlx import nn
from mlxlm.checkpoint.mlx_lm_config import OWN_ROPE, needs_multimodal_model, to_mlx_lm_config
from mlxlm.checkpoint.mlx_lm_rope import install_rope
from mlxlm.checkpoint.mlx_lm_unread_fields import check_unread_fields, supported_length
from mlxlm.checkpoint.mlx_lm_weights import patched_model_class
from mlxlm.config import quantization
from mlxlm.families import get_quantization_config
from mlxlm.utils.errors import CheckpointError

_MOST = 10_000  # layers or experts; no model is near it, and each is a Python object
_COUNTED = re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?(?:layers?|experts)$")
_SHARES = {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
_ROTATES_SHARE = ("glm", "qwen3_5", "qwen3_5_moe", "recurrent_gemma")
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def build_model(values: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, str] | None]:
    """A model with the architecture of config.json and without its weights, and how long its texts can be: see
    `supported_length`.

    Raises CheckpointError, naming the field, for what mlx_lm has no model for or computes otherwise.
    """
    if values.get("model_file") is not None:
        problem = f"config.json asks for Python code in the model's folder (model_file is {values['model_file']!r})"
        raise CheckpointError(f"{problem}, and mlxlm runs none")
    if text_only := needs_multimodal_model(values):
        values = {"model_type": values["model_type"].removesuffix("_text"), "text_config": values}
    name = _module_name(values)
    if name == "olmo" and "d_model" not in values:
        raise CheckpointError("mlx_lm's olmo has no model for a config.json of transformers, only for one with d_model")
    if (plan := get_quantization_config(values)) is not None and (config_errors := [*quantization.config_errors(plan)]):
        raise CheckpointError("; ".join(config_errors[:3]))
    model_class, args_class = _classes(name)
    with _explained(name, {}, values):
        config = to_mlx_lm_config(values)
    _check_counts(config)
    fields = {**inspect.signature(args_class).parameters, **(_text_fields(name) if "text_config" in config else {})}
    check_unread_fields(name, fields, config)
    with _explained(name, fields, config):
        model = patched_model_class(name, model_class, text_only)(args_class.from_dict(config))
    if name not in OWN_ROPE:
        install_rope(model, values, name in _ROTATES_SHARE or not _SHARES.isdisjoint(fields))
    return model, supported_length(name, fields, config)


def _module_name(values: Mapping[str, Any]) -> str:
    """The module of `mlx_lm.models` for a configuration: only what mlx_lm ships, whatever the file says."""
    import mlx_lm.models
    from mlx_lm import utils

    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"model_type is {kind!r}, it must be a name")
    classes = values.get("architectures")
    by_class = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    named = (by_class.get((kind, name)) for name in (classes if isinstance(classes, list) else ()))
    name = next(filter(None, named), utils.MODEL_REMAPPING.get(kind, kind))
    if name not in {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}:
        raise CheckpointError(f"neither mlxlm nor mlx_lm has a model for model_type {kind!r}")
    return name


def _classes(name: str) -> tuple[type[nn.Module], Any]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            module = importlib.import_module(f"mlx_lm.models.{name}")
        return module.Model, module.ModelArgs
    except AttributeError:  # "base", "cache", ...
        raise CheckpointError(f"neither mlxlm nor mlx_lm has a model for model_type {name!r}") from None
    except (ImportError, SystemExit) as error:  # where a package is missing, mlx_lm's olmo says so and exits
        said = printed.getvalue().strip() or str(error)
        command = re.search(r"pip install \S+", said)
        raise CheckpointError(f"mlx_lm's {name} can't be imported: {said}", command and command[0]) from None


def _text_fields(name: str) -> dict[str, Any]:
    """The fields of `text_config` that a model for pictures and text reads: those of every dataclass in its module and
    in the modules of mlx_lm.models that it takes its language model from."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    modules = {module.__name__: module}
    for value in vars(module).values():
        origin = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if isinstance(origin, str) and origin.startswith("mlx_lm.models."):
            modules[origin] = sys.modules[origin]
    classes = [value for module in modules.values() for value in vars(module).values() if isinstance(value, type)]
    return {field.name: field for cls in classes if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)}


def _check_counts(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif _COUNTED.search(name) and isinstance(value, int | float) and not 0 <= value <= _MOST:
            raise CheckpointError(f"{name} is {value!r}, it must be from 0 to {_MOST}")


@contextlib.contextmanager
def _explained(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[None]:
    """Errors of code that takes a configuration to be complete and right, by the fields that they are about."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        missing = _MISSING.search(str(error))
        lacks = re.findall(r"'(\w+)'", missing[1]) if missing else error.args if isinstance(error, KeyError) else ()
        if lacks:
            names = ", ".join(map(str, lacks))
            raise CheckpointError(f"config.json lacks {names}, which mlx_lm's {name} needs") from error
        about = ", ".join(f"{field} {config.get(field)!r}" for field in _fields_at(error, fields, config))
        if not about:
            raise CheckpointError(f"mlx_lm's {name} can't be built from this config.json: {error}") from error
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise CheckpointError(f"mlx_lm's {name} can't be built with {about}{reason}") from error


def _fields_at(error: Exception, fields: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The fields that mlx_lm's code was reading where it failed: those of the line, or else what the function had read
    before and the configuration hasn't."""
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_model(frame.f_code)]
    if not places:
        return []
    code, last = places[-1]
    found = _fields_in(linecache.getline(code.co_filename, last), fields)
    before = "".join(linecache.getline(code.co_filename, line) for line in range(code.co_firstlineno, last))
    return found or [field for field in _fields_in(before, fields) if config.get(field) is None]


def _is_model(code: CodeType) -> bool:
    return "mlx_lm" in Path(code.co_filename).parts


def _fields_in(text: str, fields: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys(re.findall(r"\.(\w+)", text)) if name in fields]
