"""Build mlx_lm's model from config.json and load its weights with mlx_lm's own loader, with mlxlm's checks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.checkpoint.adapter import Adapter
from mlxlm.checkpoint.checkpoint import MlxLmCheckpoint, token_id_list
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.mlx_lm.config_fields import (
    check_unread_fields,
    needs_multimodal_model,
    supported_length,
    to_mlx_lm_config,
)
from mlxlm.checkpoint.mlx_lm.install_rope import MODEL_SPECIFIC_ROPE, install_rope, with_rope_parameters
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config import quantization
from mlxlm.config.numbers import is_count
from mlxlm.families import FAMILIES, get_quantization_config, unsupported_feature
from mlxlm.utils.errors import CheckpointError, ConfigError

_NO_LIMIT = 2**31 - 1
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)
_MAX_MODULES = 10_000  # layers or experts; no model is near it, and each is a Python object
_COUNT_FIELD = re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?(?:layers?|experts)$")
# Values of `quant_method` that mlx_lm loads, None among them. It reads GPTQ's weights as if their layout was AWQ's.
_QUANT_METHODS = (None, "awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8")
_PARTIAL_ROTARY_FIELDS = {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
_PARTIAL_ROTARY_MODELS = ("glm", "recurrent_gemma")
_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class MlxLmConfig:
    """The part of a configuration that generation needs, for a model of mlx_lm."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]


def load_with_mlx_lm(checkpoint: MlxLmCheckpoint) -> tuple[nn.Module, MlxLmConfig]:
    """Load the model of an open checkpoint through mlx_lm, in evaluation mode.

    Raises:
        CheckpointError: mlx_lm can't load the checkpoint, or would compute something else than config.json says.
    """
    model, limit = build_with_mlx_lm(checkpoint)
    _load_weights(model, checkpoint)
    if ON_CPU:
        model.apply(as_float32)
    model.eval()
    return model, read_config(checkpoint, model, limit)


def read_config(checkpoint: MlxLmCheckpoint, model: nn.Module, limit: tuple[int, str] | None) -> MlxLmConfig:
    """Read what generation needs of a configuration; `model` and `limit` are those of `build_with_mlx_lm`.

    Raises:
        CheckpointError: eos_token_id isn't a token id or a list of them.
    """
    folder, values = checkpoint.path, checkpoint.hf_config
    nested = values.get("text_config")
    values = {**(nested if isinstance(nested, Mapping) else {}), **{k: v for k, v in values.items() if v is not None}}
    eos = values.get("eos_token_id")
    eos_ids = token_id_list(eos)
    if not all(type(id) is int for id in eos_ids):
        raise CheckpointError(f"{folder}: eos_token_id is {eos!r}, it must be a token id or a list of them")
    context = _count(values, model, *_CONTEXT_FIELDS)
    return MlxLmConfig(
        model_type=str(values.get("model_type")),
        vocab_size=_count(values, model, "vocab_size"),
        max_position_embeddings=min(context, limit[0]) if limit else context,
        eos_token_ids=frozenset(eos_ids),
    )


def build_with_mlx_lm(checkpoint: MlxLmCheckpoint) -> tuple[nn.Module, tuple[int, str] | None]:
    """Build the model of a checkpoint without its weights.

    Returns:
        The model, and the length up to which it computes what config.json says, with the name of the field that it
        ignores beyond that length; None if there is no such limit.

    Raises:
        CheckpointError: As `load_with_mlx_lm`.
    """
    if checkpoint.format == "pytorch":
        message = f"{checkpoint.path}: mlx_lm reads safetensors, not pytorch files"
        raise CheckpointError(message, "load and save_pretrained() the model with transformers")
    try:
        return build_model(checkpoint.hf_config)
    except (CheckpointError, ConfigError) as error:
        raise error.prefixed(checkpoint.path, CheckpointError) from error.__cause__


def _load_weights(model: nn.Module, checkpoint: MlxLmCheckpoint) -> None:
    """Load the weights with mlx_lm's own loader, which knows many forms of quantization."""
    from mlx_lm.utils import load_model

    quantization = get_quantization_config(checkpoint.hf_config)
    quantization = merge_adapter(model, checkpoint.adapter, quantization)
    model_args = SimpleNamespace(from_dict=lambda config: model)
    try:
        load_model(
            checkpoint.path,
            lazy=True,
            model_config={} if quantization is None else {"quantization": quantization},
            get_model_classes=lambda config: (lambda args: args, model_args),
            trust_remote_code=False,
        )
    except CheckpointError as error:
        raise error.prefixed(checkpoint.path, CheckpointError) from None
    except Exception as error:  # mlx_lm raises anything from KeyError to RuntimeError for a file it can't read
        unreadable = f"mlx_lm can't load this {checkpoint.hf_config.get('model_type')} model: {error}"
        raise CheckpointError(f"{checkpoint.path}: {_mismatch(str(error)) or unreadable}") from error


def merge_adapter(
    model: nn.Module, adapter: Adapter | None, quantization: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Let the `sanitize` of a model merge an adapter.

    Args:
        model: The model, without weights.
        adapter: The adapter; None: there is none.
        quantization: The settings of MLX's quantization.

    Returns:
        The settings of the result, which `sanitize` changes.
    """
    changed = None if quantization is None else dict(quantization)
    if adapter is not None:
        is_tied = not any("lm_head" in name for name, _ in tree_flatten(model.parameters()))
        model.merge = partial(_merge, adapter, changed, is_tied)
    return changed


def _merge(
    adapter: Adapter, quantization: dict[str, Any] | None, is_tied: bool, from_mlx_lm: bool, weights: Weights
) -> Weights:
    """Merge an adapter into the weights, if they have its names; what it changes isn't quantized any more."""
    if adapter.from_mlx_lm != from_mlx_lm:
        return weights
    tensors = {name: lazy_tensor(value) for name, value in weights.items()}
    merged = adapter.merge_by_name(tensors, quantization, is_tied)
    for name in weights:
        module, _, part = name.rpartition(".")
        if part == "scales" and name not in merged and quantization and module in quantization:
            quantization[module] = False
    return {name: tensor.read() for name, tensor in merged.items()}


def _mismatch(text: str) -> str | None:
    """Reword MLX's error about weights that aren't those of the model as `open_checkpoint` words it."""
    if shapes := re.match(r"Expected shape (.+) but received shape (.+) for parameter (\S+)", text):
        return f"the weights don't match the configuration: {shapes[3]} is {shapes[2]}, it must be {shapes[1]}"
    if not (names := re.match(r"(Missing|Received) (\d+) parameters(?: not in model)?:\s*(\S+?),?\.?(?:\s|$)", text)):
        return None
    problem = "is missing" if names[1] == "Missing" else "is not part of mlx_lm's model"
    more = f" (and {int(names[2]) - 1} more)" if names[2] != "1" else ""
    return f"the weights don't match the configuration: {names[3]} {problem}{more}"


def _count(values: Mapping[str, Any], model: nn.Module, *names: str) -> int:
    """Return the first of these fields that is a positive integer, else the model's default."""
    candidates = [values.get(name) for name in names]
    for part in (getattr(model, "language_model", None), model):
        candidates += [getattr(getattr(part, "args", None), name, None) for name in names]
    return next(filter(is_count, candidates), _NO_LIMIT)


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
    text_only = needs_multimodal_model(values)
    values = _with_text_config(values)
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


def _with_text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of mlx_lm's multimodal model, if the language model is implemented as a part of it only."""
    if not needs_multimodal_model(values):
        return values
    return {"model_type": values["model_type"].removesuffix("_text"), "text_config": values}


def mlx_lm_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the fields that mlx_lm's model reads, which mlxlm reads as the same model.

    Args:
        values: A configuration that `build_model` accepts.
    """
    for _ in range(2):  # the second time reads what the first one adds because mlx_lm requires it
        values = _keep_rope_scaling(to_mlx_lm_config(with_rope_parameters(_with_text_config(values))))
    return dict(values)


def _keep_rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the `rope_scaling` that `to_mlx_lm_config` leaves to `install_rope`, which mlx_lm itself doesn't have."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return {**config, "text_config": _keep_rope_scaling(nested)}
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":
        return dict(config)
    return {**config, "rope_scaling": {**rope, "type": rope["rope_type"]}}


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


def patched_model_class(name: str, model_class: type[nn.Module], text_only: bool) -> type[nn.Module]:
    """Return a subclass of mlx_lm's model `name` whose `sanitize` accepts the tensors that transformers 5 saves.

    Args:
        name: Module in `mlx_lm.models`.
        model_class: Its model.
        text_only: Whether the checkpoint is a language model alone and mlx_lm's model is multimodal.
    """

    class PatchedModel(model_class):
        """mlx_lm's model with another `sanitize`, and with the caches of `mlxlm.cache.mlx_lm_caches`."""

        def __init__(self, args: Any):
            super().__init__(args)
            own = self.make_cache() if hasattr(self, "make_cache") else ()
            self.merge: Callable[[bool, Weights], Weights] = lambda from_mlx_lm, weights: weights
            self._cache_counts = [len(cache.caches) if hasattr(cache, "caches") else 0 for cache in own]

        def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> Any:
            """Compute the logits. The caches of a layer that has several are given one after another."""
            if cache is None and name == "gemma3n":  # without, layers would compute the keys that they should share
                cache = self.make_cache()
            for layer_cache in cache or ():
                if hasattr(layer_cache, "begin_update"):
                    layer_cache.begin_update(*inputs.shape[:2])
            if cache and any(self._cache_counts):
                rest = iter(cache)
                cache = [tuple(islice(rest, count)) if count else next(rest) for count in self._cache_counts]
            return super().__call__(inputs, cache=cache, **options)

        def sanitize(self, weights: Weights) -> Weights:
            """Rename and reshape tensors before mlx_lm's own `sanitize`; before and after it, merge an adapter."""
            weights = self.merge(False, {n: x for n, x in weights.items() if not n.startswith("model.vision_")})
            if text_only:
                outer, inner = ("model.", "language_model.") if name == "gemma3n" else ("", "language_model.")
                prefix = outer + inner
                weights = {prefix + n.removeprefix(prefix).removeprefix(outer): x for n, x in weights.items()}
            for pattern, new in _RENAMED.get(name, ()):
                weights = {re.sub(pattern, new, n): x for n, x in weights.items()}
            if name == "gemma3n":
                weights = _gemma3n(weights)
            if name == "ernie4_5_moe":
                _check_ernie4_5_moe(weights)
            return self.merge(True, super().sanitize(weights) if hasattr(model_class, "sanitize") else weights)

    return PatchedModel


def _check_ernie4_5_moe(weights: Weights) -> None:
    """mlx_lm has no router correction bias."""
    for name, value in weights.items():
        if name.endswith("e_score_correction_bias") and mx.any(value != 0).item():
            raise CheckpointError(f"{name} isn't zero, which mlx_lm's ernie4_5_moe doesn't implement")


def _gemma3n(weights: Weights) -> Weights:
    """Layers that use the keys of others: newer files lack projections that mlx_lm's model has, but never uses."""
    queries, result = "q_proj.weight", dict(weights)
    for name in (name for name in weights if name.endswith(queries)):
        for unused in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            first = re.sub(r"layers\.\d{1,9}\.", "layers.0.", name).replace(queries, unused)
            if first in weights:
                result.setdefault(name.replace(queries, unused), weights[first])
    return result


# Pattern of a name that transformers saves, and what mlx_lm's model has instead.
_RENAMED = {
    "nanochat": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.c_\1."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.mlp\.fc1\.", ".mlp.c_fc."),
        (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    ),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
}
