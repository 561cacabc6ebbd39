"""Build mlx_lm's model from config.json, without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mlxlm.backend.mlx import nn
from mlxlm.checkpoint.mlx_lm.config import needs_multimodal_model, to_mlx_lm_config
from mlxlm.checkpoint.mlx_lm.rope import MODEL_SPECIFIC_ROPE, install_rope, with_rope_parameters
from mlxlm.checkpoint.mlx_lm.unread_fields import check_unread_fields, supported_length
from mlxlm.checkpoint.mlx_lm.weights import patched_model_class
from mlxlm.config import quantization
from mlxlm.families import FAMILIES, get_quantization_config, unsupported_feature
from mlxlm.utils.errors import CheckpointError

_MAX_MODULES = 10_000  # layers or experts; no model is near it, and each is a Python object
_COUNT_FIELD = re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?(?:layers?|experts)$")
# Values of `quant_method` that mlx_lm loads, None among them. It reads GPTQ's weights as if their layout was AWQ's.
_QUANT_METHODS = (None, "awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8")
_PARTIAL_ROTARY_FIELDS = {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
_PARTIAL_ROTARY_MODELS = ("glm", "qwen3_5", "qwen3_5_moe", "recurrent_gemma")
_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def build_model(values: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, str] | None]:
    """Build a model with the architecture of config.json, without its weights.

    Returns:
        The model and the limit of `supported_length`.

    Raises:
        CheckpointError: Names the field that mlx_lm has no model for or computes differently.
    """
    if values.get("model_file") is not None:
        field = f"model_file is {values['model_file']!r}"
        raise CheckpointError(f"{field}: mlxlm doesn't run Python code from a model's folder")
    if text_only := needs_multimodal_model(values):
        values = {"model_type": values["model_type"].removesuffix("_text"), "text_config": values}
    name = _module_name(values)
    if name == "olmo" and "d_model" not in values:
        raise CheckpointError("mlx_lm's olmo needs a config.json with d_model, not one of transformers")
    plan = get_quantization_config(values)
    foreign = values.get("quantization_config")
    if plan is None and isinstance(foreign, Mapping) and (method := foreign.get("quant_method")) not in _QUANT_METHODS:
        hint = "its unquantized original, and mlxlm quantize; or one that was quantized with MLX"
        name = "GPTQ" if method == "gptq" else method
        raise CheckpointError(f"this is a {name} checkpoint, which isn't supported", hint)
    if plan is not None and (problems := [*quantization.validate_quantization(plan)]):
        raise CheckpointError("; ".join(problems))
    model_class, args_class = _classes(name)
    values = with_rope_parameters(values)
    with _config_errors(name):
        config = to_mlx_lm_config(values)
    _check_counts(config)
    fields = {**inspect.signature(args_class).parameters, **(_text_fields(name) if "text_config" in config else {})}
    check_unread_fields(name, fields, config)
    with _config_errors(name):
        model = patched_model_class(name, model_class, text_only)(args_class.from_dict(config))
    if name not in MODEL_SPECIFIC_ROPE:
        install_rope(model, values, name in _PARTIAL_ROTARY_MODELS or not _PARTIAL_ROTARY_FIELDS.isdisjoint(fields))
    return model, supported_length(name, fields, config)


def _module_name(values: Mapping[str, Any]) -> str:
    """Name of the module of `mlx_lm.models` for a configuration; only modules that mlx_lm ships."""
    import mlx_lm.models
    from mlx_lm import utils

    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"model_type is {model_type!r}, it must be a string")
    classes = values.get("architectures")
    by_class = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    remapped = (by_class.get((model_type, name)) for name in (classes if isinstance(classes, list) else ()))
    name = next(filter(None, remapped), utils.MODEL_REMAPPING.get(model_type, model_type))
    if name not in {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}:
        if model_type in FAMILIES:
            reason = unsupported_feature(values)
            raise CheckpointError(f"mlxlm's decoder has no {reason}, and mlx_lm has no {model_type} models")
        raise CheckpointError(f"neither mlxlm nor mlx_lm has a model for model_type {model_type!r}")
    return name


def _classes(name: str) -> tuple[type[nn.Module], Any]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            module = importlib.import_module(f"mlx_lm.models.{name}")
        return module.Model, module.ModelArgs
    except AttributeError:  # "base", "cache", ...
        raise CheckpointError(f"neither mlxlm nor mlx_lm has a model for model_type {name!r}") from None
    except (ImportError, SystemExit) as error:  # where a package is missing, mlx_lm's olmo prints that and exits
        message = printed.getvalue().strip() or str(error)
        command = re.search(r"pip install \S+", message)
        raise CheckpointError(f"mlx_lm's {name} can't be imported: {message}", command and command[0]) from None


def _text_fields(name: str) -> dict[str, Any]:
    """Return the fields of `text_config` that a multimodal model reads.

    Those are the fields of every dataclass in its module and in the modules of mlx_lm.models that it imports from.
    """
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
        elif _COUNT_FIELD.search(name) and isinstance(value, int | float) and not 0 <= value <= _MAX_MODULES:
            raise CheckpointError(f"{name} is {value!r}, it must be from 0 to {_MAX_MODULES}")


@contextlib.contextmanager
def _config_errors(name: str) -> Iterator[None]:
    """Turn any exception of mlx_lm's code into a CheckpointError, which names missing fields."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        missing = _MISSING_ARGUMENT.search(str(error))
        absent = re.findall(r"'(\w+)'", missing[1]) if missing else error.args if isinstance(error, KeyError) else ()
        if absent:
            names = ", ".join(map(str, absent))
            raise CheckpointError(f"config.json lacks {names}, which mlx_lm's {name} needs") from error
        raise CheckpointError(f"mlx_lm's {name} can't be built from this config.json: {error}") from error
