"""Read LoRA adapters of PEFT and mlx_lm, and merge them into a model's weights, lazily and in float32.

LoRA adds `scale * B @ A` to a matrix (https://arxiv.org/abs/2106.09685). The scale of PEFT is alpha / r, and with
rsLoRA alpha / sqrt(r) (https://arxiv.org/abs/2312.03732). DoRA then gives each row of the sum a norm of its own, its
magnitude (https://arxiv.org/abs/2402.09353).
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import hub, pytorch, safetensors
from mlxlm.checkpoint.dequantize import (
    activation_dtype,
    dequantize_tensors,
    dequantize_to_scales,
    rounded_scales,
)
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_count, is_number
from mlxlm.families import WeightMapping
from mlxlm.utils.errors import CheckpointError, short_repr
from mlxlm.utils.json_files import read_json_object

CONFIG_FILE = "adapter_config.json"
MLX_LM_FILE = "adapters.safetensors"
PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_CONFIG = 4 << 20  # bytes; patterns for thousands of modules have 1 MB
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
# Fields of PEFT's LoraConfig that, if they are set, compute something else or train other parameters.
_UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "layer_replication", "lora_bias",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")  # others change the model's weights, too
_PLAIN_NAME = re.compile(r"\^?[\w.-]+")  # of a pattern; matching a regular expression from a file might take for ever
_PEFT_PREFIX = "base_model.model."
_PEFT_NAME = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")
_MLX_LM_NAME = re.compile(r"(.+)\.(lora_a|lora_b|m)")
# The part of a LowRankUpdate by the end of a name; an embedding is the transpose of a linear layer's matrix.
_PARTS = {
    **{"A": "a", "B": "b", "embedding_A": "b", "embedding_B": "a", "magnitude_vector": "magnitude"},
    **{"lora_a": "a", "lora_b": "b", "m": "magnitude"},
}
_OTHER_MODEL = "the model that the adapter was trained for"
_MERGED = "a model that merge_and_unload() and save_pretrained() of peft made"


@dataclass(frozen=True)
class LowRankUpdate:
    """The change of one matrix `[R, C]`, or of the matrices `[E, R, C]` of all experts.

    Attributes:
        a: `[r, C]` or `[E, r, C]`.
        b: `[R, r]` or `[E, R, r]`.
        scale: The factor of `b @ a`.
        magnitude: The norm of each row of the result, `[R]`; None without DoRA.
        name: A tensor of the file, for errors.
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    magnitude: LazyTensor | None
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it changes."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def apply(self, weight: mx.array) -> mx.array:
        """The changed weight, in float32."""
        a, b = (part.read().astype(mx.float32) for part in (self.a, self.b))
        weight = weight.astype(mx.float32) + (self.scale * b) @ a
        if self.magnitude is None:
            return weight
        return (self.magnitude.read().astype(mx.float32) / mx.linalg.norm(weight, axis=1))[:, None] * weight


@dataclass(frozen=True)
class ExpertUpdates:
    """The changes of some of the matrices `[E, R, C]` of a mixture, where each expert has its own.

    Attributes:
        updates: By expert, at least one.
    """

    updates: dict[int, LowRankUpdate]

    @property
    def name(self) -> str:
        """A tensor of the file, for errors."""
        return next(iter(self.updates.values())).name

    def apply(self, weight: mx.array) -> mx.array:
        """The changed weight, in float32."""
        weight = weight.astype(mx.float32)
        return mx.stack([self.updates[e].apply(w) if e in self.updates else w for e, w in enumerate(weight)])


@dataclass(frozen=True)
class Adapter:
    """An adapter whose headers were read.

    Attributes:
        file: The file of its weights.
        from_mlx_lm: Whether its names are those of mlx_lm's modules, rather than those of transformers.
        updates: Changes of matrices by module.
        weights: Tensors that replace those of the model, by name.
    """

    file: Path
    from_mlx_lm: bool
    updates: Mapping[str, LowRankUpdate] = field(repr=False)
    weights: LazyTensors = field(repr=False)

    def merge_into_decoder(
        self, config: ModelConfig, tensors: LazyTensors
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        """Merge it into the tensors of mlxlm's decoder.

        Returns:
            The configuration and the tensors. PEFT changes a tied embedding without the head, or the head without the
            embedding: then they are not tied any more.

        Raises:
            CheckpointError: Names the file and a tensor that doesn't fit the model.
        """
        untied = config.with_changes(tie_word_embeddings=False)
        mappings = families.weight_mappings(untied, for_mlx=self.from_mlx_lm)
        mappings = [mapping for mapping in mappings if not mapping.per_head]
        fused = {mapping.name: mapping.modules for mapping in mappings}

        def file_name(name: str) -> str:
            text_name = families.text_tensor_name(name) or name
            return families.normalize_tensor_name(untied, text_name) or name

        updates, weights = self._renamed(file_name)
        kv_b = [m for m in families.kv_b_mappings(config) if m.name in updates or f"{m.name}.weight" in weights]
        tensors = _with_kv_b(kv_b, tensors, config.quantization)
        part_updates: dict[str, LowRankUpdate | ExpertUpdates] = {}
        for mapping in mappings:
            names = {name: expert for expert, name in enumerate(mapping.expert_names()) if name in updates}
            if experts := {expert: updates.pop(name) for name, expert in names.items()}:
                part_updates[mapping.modules[0]] = ExpertUpdates(experts)
        num_experts = len(part_updates)
        half = "lora_b" if self.from_mlx_lm else "lora_B"
        rows = {f"{name}.{half}": u.b for name, u in updates.items()}  # split and reordered like those of weights
        rows |= {f"{name}.magnitude": u.magnitude for name, u in updates.items() if u.magnitude is not None}
        parts = to_decoder_weights(mappings, rows, str(self.file))
        targets = [(part, update) for name, update in updates.items() for part in fused.get(name, (name,))]
        part_updates |= {
            part: replace(update, b=parts[f"{part}.{half}"], magnitude=parts.get(f"{part}.magnitude"))
            for part, update in targets
        }
        if len(part_updates) < len(targets) + num_experts:
            raise CheckpointError(f"{self.file}: a module occurs twice, fused with others and alone")
        part_weights = to_decoder_weights(mappings, weights, str(self.file))
        changed = {*part_updates, *map(_module, part_weights)}
        if config.tie_word_embeddings and not self.from_mlx_lm and not changed.isdisjoint((_EMBEDDING, _HEAD)):
            copies = [name for name in tensors if _module(name) == _EMBEDDING]
            tensors = {**tensors, **{name.replace(_EMBEDDING, _HEAD): tensors[name] for name in copies}}
            quantization = config.quantization
            if quantization and _EMBEDDING in quantization:
                quantization = {**quantization, _HEAD: quantization[_EMBEDDING]}
            config = untied.with_changes(quantization=quantization)
        merged = self._merge(tensors, config.quantization, part_updates, part_weights)
        return config, to_decoder_weights(kv_b, merged, str(self.file))

    def merge_by_name(
        self, tensors: LazyTensors, quantization: Mapping[str, Any] | None, is_tied: bool
    ) -> dict[str, LazyTensor]:
        """Merge it into tensors that have the adapter's names.

        Args:
            tensors: The tensors of the model.
            quantization: MLX's settings.
            is_tied: Whether the model uses its embedding as its head.

        Raises:
            CheckpointError: Names the file and a tensor that doesn't fit the model.
        """
        by_text_name = {families.text_tensor_name(name) or name: name for name in tensors}

        def model_name(name: str) -> str:
            return name if name in tensors else by_text_name.get(families.text_tensor_name(name) or name, name)

        updates, weights = self._renamed(model_name)
        matrices = [*updates, *(name for name, tensor in weights.items() if len(tensor.shape) == 2)]
        outside = next((name for name in matrices if not re.search(r"\.\d+\.", name)), None)
        if is_tied and not self.from_mlx_lm and outside is not None:
            problem = f"it changes {outside}, and the embedding of this model is also its head"
            raise CheckpointError(f"{self.file}: {problem}", _MERGED)
        return self._merge(tensors, quantization, updates, weights)

    def _renamed(self, rename: Callable[[str], str]) -> tuple[dict[str, LowRankUpdate], dict[str, LazyTensor]]:
        """Return `updates` and `weights` with other names of the tensors."""
        updates = {_module(rename(f"{name}.weight")): update for name, update in self.updates.items()}
        weights = {rename(name): tensor for name, tensor in self.weights.items()}
        if len(updates) + len(weights) < len(self.updates) + len(self.weights):
            raise CheckpointError(f"{self.file}: a module occurs twice, with and without a prefix")
        return updates, weights

    def _merge(
        self,
        tensors: LazyTensors,
        quantization: Mapping[str, Any] | None,
        updates: Mapping[str, LowRankUpdate | ExpertUpdates],
        weights: LazyTensors,
    ) -> dict[str, LazyTensor]:
        dense = dequantize_tensors(tensors, quantization) if quantization else tensors
        scales = {**tensors, **rounded_scales(tensors)} if quantization else tensors
        result, num_dequantized = dict(tensors), 0
        by_weight = {f"{module}.weight": update for module, update in updates.items()}
        for name in dict.fromkeys((*by_weight, *weights)):
            update, module = by_weight.get(name), _module(name)
            if (base := dense.get(name)) is None:
                tensor = name if update is None else update.name
                problem = f"{tensor} is for {module}, which the model doesn't have"
                raise CheckpointError(f"{self.file}: {problem}", _OTHER_MODEL)
            dtype = base.dtype
            if base is not tensors[name]:
                dtype, num_dequantized = activation_dtype(scales[f"{module}.scales"]), num_dequantized + 1
                for part in ("scales", "biases"):
                    result.pop(f"{module}.{part}", None)
            if not mx.issubdtype(dtype, mx.floating) or f"{module}.global_scale" in tensors:
                hint = "the unquantized model, or one quantized by MLX"
                raise CheckpointError(f"{self.file} can't change {name}, which is of type {base.stored_dtype}", hint)
            if name in weights:
                self._check_shape(name, weights[name].shape, base.shape)
                base = weights[name]
            if update is not None:
                if isinstance(update, ExpertUpdates):
                    for expert in update.updates.values():
                        self._oriented(expert, base.shape[1:])
                else:
                    update = self._oriented(update, base.shape)
                base = base.transform(update.apply)
            nbytes = math.prod(base.shape) * dtype.size
            merged = base.transform(partial(mx.array.astype, dtype=dtype), dtype=dtype)
            result[name] = replace(merged, stored_dtype=safetensors.DTYPE_NAMES[dtype], nbytes=nbytes)
        if num_dequantized:
            matrices = "matrix is" if num_dequantized == 1 else "matrices are"
            problem = f"{num_dequantized} quantized {matrices} dequantized, because {self.file.parent} changes them"
            warnings.warn(problem, stacklevel=4)
        return result

    def _oriented(self, update: LowRankUpdate, shape: tuple[int, ...]) -> LowRankUpdate:
        """Return the update of a weight of this shape, after checking that it is one."""
        if self.from_mlx_lm and update.shape != shape == update.shape[::-1]:  # an embedding, which mlx_lm transposes
            update = replace(update, a=_transpose(update.b), b=_transpose(update.a))
        self._check_shape(update.name, update.shape, shape)
        if update.magnitude is not None:
            self._check_shape(f"the magnitude next to {update.name}", update.magnitude.shape, shape[:-1])
        return update

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            problem = f"{name} is for shape {list(shape)}, the model has {list(expected)}"
            raise CheckpointError(f"{self.file}: {problem}", _OTHER_MODEL)


def open_adapter(source: Path | str) -> Adapter:
    """Open an adapter of PEFT or mlx_lm; only headers are read.

    Args:
        source: Its folder, or its hub id or address.

    Raises:
        CheckpointError: Names the file and the field or tensor.
    """
    source = hub.without_address(str(source))
    hint = f"a folder that has {CONFIG_FILE}, or a hub id"
    if not os.path.exists(source) and hub.is_id(source):
        folder = hub.download_adapter(source)
    elif os.path.isdir(source):
        folder = Path(source)
    else:
        problem = f"{source} is a file" if os.path.exists(source) else f"there is no adapter {source!r}"
        raise CheckpointError(problem, hint)
    values = read_json_object(folder / CONFIG_FILE, _MAX_CONFIG, CheckpointError, hint)
    if "peft_type" in values:
        return _open_peft(folder, values)
    if "fine_tune_type" in values or "lora_parameters" in values:
        return _open_mlx_lm(folder, values)
    raise CheckpointError(f"{folder / CONFIG_FILE} has neither peft_type nor fine_tune_type", hint)


def _open_peft(folder: Path, values: Mapping[str, Any]) -> Adapter:
    config = folder / CONFIG_FILE

    def refuse(name: str, hint: str) -> None:
        raise CheckpointError(f"{config}: {name} {short_repr(values[name])} is not supported", hint)

    if values["peft_type"] != "LORA":
        refuse("peft_type", "an adapter of type LORA")
    if values.get("bias", "none") != "none":
        refuse("bias", f"an adapter with bias none, or {_MERGED}")
    for name in ("use_dora", "use_rslora"):
        if values.get(name) not in (None, True, False):
            refuse(name, "true or false")
    for name in filter(values.get, _UNSUPPORTED):
        refuse(name, _MERGED)
    if values.get("init_lora_weights") not in _INITIALIZATIONS:
        refuse("init_lora_weights", f"peft's path_initial_model_for_weight_conversion, or {_MERGED}")
    rank_of = _by_pattern(config, values, "r", "rank_pattern", is_count, "a positive integer")
    alpha_of = _by_pattern(config, values, "lora_alpha", "alpha_pattern", is_number, "a number")
    file = next((folder / name for name in PEFT_FILES if (folder / name).exists()), folder / PEFT_FILES[0])
    tensors = pytorch.file_tensors(file) if file.suffix == ".bin" else safetensors.file_tensors(file)
    for name in tensors:
        if not name.startswith(_PEFT_PREFIX):
            raise CheckpointError(f"{file}: {name} doesn't begin with {_PEFT_PREFIX}", "a file that peft saved")
    tensors = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    modules, others = _group(file, tensors, _PEFT_NAME, bool(values.get("use_dora")))
    updates = {}
    for module, parts in modules.items():
        rank, alpha = rank_of(module), alpha_of(module)
        scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
        is_embedding = ".lora_embedding_" in parts["a"][0]
        if is_embedding and "magnitude" in parts:
            raise CheckpointError(f"{file}: {parts['magnitude'][0]}: DoRA of embeddings is not supported", _MERGED)
        updates[module] = _update(file, parts, rank, scale, is_embedding)
    weights = {re.sub(r"\.(base_layer|modules_to_save)(?=\.\w+$)", "", name): other for name, other in others.items()}
    return Adapter(file, False, updates, weights)


def _by_pattern(
    file: Path,
    values: Mapping[str, Any],
    name: str,
    patterns_name: str,
    is_valid: Callable[[Any], bool],
    expected: str,
) -> Callable[[str], Any]:
    """Return a function from a module to the value of its pattern, or else of the field `name`."""
    patterns = values.get(patterns_name) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{file}: {patterns_name} is {short_repr(patterns)}, it must be an object")
    for pattern, value in (("", values.get(name)), *patterns.items()):
        if not is_valid(value) or not abs(value) < 3e38:
            where = f"{patterns_name}.{pattern}" if pattern else name
            raise CheckpointError(f"{file}: {where} is {short_repr(value)}, it must be {expected}")
        if pattern and not _PLAIN_NAME.fullmatch(pattern):
            problem = f"{patterns_name} has the regular expression {short_repr(pattern)}, which is not supported"
            raise CheckpointError(f"{file}: {problem}", "names of modules")

    def value_of(module: str) -> Any:
        for pattern, value in patterns.items():
            if f"^{module}" == pattern or f".{module}".endswith(f".{pattern}"):
                return value
        return values[name]

    return value_of


def _open_mlx_lm(folder: Path, values: Mapping[str, Any]) -> Adapter:
    config, file = folder / CONFIG_FILE, folder / MLX_LM_FILE
    kind = values.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        raise CheckpointError(f"{config}: fine_tune_type {short_repr(kind)} is not supported", "lora, dora or full")
    if kind == "full":
        return Adapter(file, True, {}, _group(file, safetensors.file_tensors(file), None)[1])
    settings = values.get("lora_parameters")
    rank, scale = (settings.get(name) if isinstance(settings, Mapping) else None for name in ("rank", "scale"))
    if not is_count(rank) or not is_number(scale) or not abs(scale) < 3e38:
        problem = f"lora_parameters is {short_repr(settings)}, it must have a positive rank and a scale"
        raise CheckpointError(f"{config}: {problem}")
    modules, others = _group(file, safetensors.file_tensors(file), _MLX_LM_NAME, kind == "dora")
    if others:
        raise CheckpointError(f"{file}: {next(iter(others))} is not part of a {kind} adapter of mlx_lm")
    updates = {}
    for module, parts in modules.items():
        experts = kind == "lora" and len(parts["a"][1].shape) == 3
        updates[module] = _update(file, parts, rank, scale, transposed=not experts, experts=experts)
    return Adapter(file, True, updates, {})


_Parts = dict[str, tuple[str, LazyTensor]]  # part of a LowRankUpdate -> its name in the file and the tensor


def _group(
    file: Path, tensors: LazyTensors, pattern: re.Pattern[str] | None, is_dora: bool = False
) -> tuple[dict[str, _Parts], dict[str, LazyTensor]]:
    """Return the parts of each module, after checking that all are there, and the other tensors."""
    modules: dict[str, _Parts] = {}
    others = {}
    for name, tensor in tensors.items():
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise CheckpointError(f"{file}: {name} is of type {tensor.stored_dtype}, not floating-point")
        if pattern is None or (match := pattern.fullmatch(name)) is None:
            others[name] = tensor
        elif modules.setdefault(match[1], {}).setdefault(_PARTS[match[2]], (name, tensor))[0] != name:
            raise CheckpointError(f"{file}: {name} occurs twice, under different names")
    expected = ("a", "b", "magnitude") if is_dora else ("a", "b")
    for parts in modules.values():
        if missing := [part for part in expected if part not in parts]:
            name = next(iter(parts.values()))[0]
            half = "magnitude" if missing == ["magnitude"] else "other half"
            raise CheckpointError(f"{file}: the {half} of {name} is missing", "copy or download the adapter again")
        if len(parts) > len(expected):
            raise CheckpointError(f"{file}: {parts['magnitude'][0]} is of DoRA, {CONFIG_FILE} says LoRA")
    return modules, others


def _update(
    file: Path, parts: _Parts, rank: int, scale: float, transposed: bool, experts: bool = False
) -> LowRankUpdate:
    """The update with these tensors, after checking their rank; `transposed`: they are `[C, r]` and `[r, R]`."""
    (name, a), (other_name, b) = parts["a"], parts["b"]
    for shown, tensor, axis in ((name, a, -2), (other_name, b, -1)):
        axis = -3 - axis if transposed else axis
        if len(tensor.shape) != (3 if experts else 2) or tensor.shape[axis] != rank:
            problem = f"{shown} is {list(tensor.shape)}, and the rank is {rank}"
            raise CheckpointError(f"{file}: {problem}", f"the {CONFIG_FILE} that was saved with it")
    if transposed:
        a, b = _transpose(a), _transpose(b)
    return LowRankUpdate(a, b, float(scale), parts["magnitude"][1] if "magnitude" in parts else None, name)


def _with_kv_b(
    mappings: Sequence[WeightMapping], tensors: LazyTensors, quantization: Mapping[str, Any] | None
) -> LazyTensors:
    """The tensors of a decoder with the `kv_b_proj` of latent attention instead of its two parts, dequantized."""
    modules = {module for mapping in mappings for module in mapping.modules}
    parts = {name: tensor for name, tensor in tensors.items() if _module(name) in modules}
    others = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return others | to_file_weights(mappings, dequantize_to_scales(parts, quantization or {}))


def _transpose(tensor: LazyTensor) -> LazyTensor:
    return tensor.transform(mx.transpose, shape=tensor.shape[::-1])


def _module(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]
