"""Checkpoints of mlx_lm's classes with the tensors of its modules, as they are quantized, converted and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.checkpoint import Checkpoint, MlxLmCheckpoint
from mlxlm.checkpoint.dequantize import check_shapes
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.mlx_lm.model import MlxLmConfig, build_with_mlx_lm, merge_adapter, mlx_lm_config, read_config
from mlxlm.checkpoint.safetensors import DTYPE_NAMES
from mlxlm.families import get_quantization_config
from mlxlm.utils.errors import CheckpointError

# Forms of quantized checkpoints whose weights MLX multiplies as they are, by Hugging Face's `quant_method`.
_MLX_FORMS = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
_DEQUANTIZED = (None, "fp8")  # by `sanitize`, if at all
_OTHER_PARTS = ("vision_config", "audio_config")  # of a multimodal model, whose tensors `sanitize` drops


@dataclass(frozen=True)
class ModuleCheckpoint(MlxLmCheckpoint):
    """A checkpoint of an architecture that only mlx_lm implements, with the tensors of mlx_lm's modules.

    Attributes:
        hf_config: The configuration with the fields that mlx_lm reads, without quantization.
        tensors: What mlx_lm's `sanitize` makes of the files' tensors: experts are stacked, for example.
        config: What generation needs of the configuration.
        modules: An instance of mlx_lm's class without its weights.
        quantization: The settings of MLX's quantization; None if it isn't quantized.
    """

    config: MlxLmConfig
    modules: nn.Module = field(repr=False)
    quantization: Mapping[str, Any] | None = None

    def with_tensors(self, tensors: LazyTensors, quantization: Mapping[str, Any] | None = None) -> Self:
        """The same model with other tensors, quantized by `quantization`."""
        return replace(self, tensors=tensors, quantization=quantization)

    def keeps_dtype(self, name: str) -> bool:
        """Whether a tensor must keep its dtype when the others are converted, as mlx_lm's class says."""
        casts = getattr(self.modules, "cast_predicate", None)
        return casts is not None and not casts(name)

    def quantizable(self) -> dict[str, nn.Module]:
        """The modules that MLX can quantize, by name."""
        leaves = tree_flatten(self.modules.leaf_modules(), is_leaf=nn.Module.is_module)
        return {name: module for name, module in leaves if hasattr(module, "to_quantized")}

    def class_format(self, name: str, module: nn.Module) -> bool | Mapping[str, Any]:
        """What mlx_lm's class says about quantizing a module: whether to, or the format it must have."""
        predicate = getattr(self.modules, "quant_predicate", None)
        return True if predicate is None else predicate(name, module)


# A checkpoint with the tensors of the modules that run it: it can be changed, run and written.
WritableCheckpoint = Checkpoint | ModuleCheckpoint


def to_modules(checkpoint: MlxLmCheckpoint) -> ModuleCheckpoint:
    """Rename and reshape the tensors of a checkpoint to those of mlx_lm's modules, lazily.

    Raises:
        CheckpointError: mlx_lm can't build the model, or its parameters aren't those of the checkpoint.
    """
    modules, limit = build_with_mlx_lm(checkpoint)
    values = checkpoint.hf_config
    quantization = get_quantization_config(values)
    if quantization is None:
        method = _quant_method(values)
        if method not in (*_DEQUANTIZED, *_MLX_FORMS):
            message = f"{checkpoint.path} was quantized by {method}, and can only be run"
            raise CheckpointError(message, "its unquantized original")
        quantization = _MLX_FORMS.get(str(method))
    quantization = merge_adapter(modules, checkpoint.adapter, quantization)
    arrays = _SanitizedArrays(checkpoint, modules)
    tensors = arrays.describe()
    check_shapes(modules, tensors, quantization, str(checkpoint.path))
    config = mlx_lm_config(values)
    read = vars(getattr(modules, "args", modules))  # other names for a field are for other models
    config = {name: value for name, value in config.items() if name in values or name in read or name == "text_config"}
    left_out = ("quantization", "quantization_config", *_OTHER_PARTS)
    return ModuleCheckpoint(
        path=checkpoint.path,
        format=checkpoint.format,
        hf_config={name: value for name, value in config.items() if name not in left_out},
        tensors=tensors,
        load_tokenizer=checkpoint.load_tokenizer,
        embedding=checkpoint.embedding,
        unsupported_reason=checkpoint.unsupported_reason,
        config=read_config(checkpoint, modules, limit),
        modules=modules,
        quantization=quantization,
    )


def _quant_method(values: Mapping[str, Any]) -> Any:
    for part in (values, values.get("text_config")):
        if isinstance(part, Mapping) and isinstance(foreign := part.get("quantization_config"), Mapping):
            return foreign.get("quant_method")
    return None


class _SanitizedArrays:
    """Returns the arrays that `sanitize` makes, lazily and each once: an evaluated array keeps its values."""

    def __init__(self, checkpoint: MlxLmCheckpoint, modules: nn.Module):
        self._checkpoint, self._modules = checkpoint, modules
        self._unread: dict[str, mx.array] = {}

    def describe(self) -> dict[str, LazyTensor]:
        self._unread = self._sanitize()
        return {
            name: LazyTensor(
                tuple(value.shape),
                value.dtype,
                DTYPE_NAMES.get(value.dtype, str(value.dtype)),
                value.nbytes,
                partial(self.read, name),
            )
            for name, value in self._unread.items()
        }

    def read(self, name: str) -> mx.array:
        if name not in self._unread:
            self._unread = self._sanitize()
        return self._unread.pop(name)

    def _sanitize(self) -> dict[str, mx.array]:
        weights = {name: tensor.read() for name, tensor in self._checkpoint.tensors.items()}
        try:
            return dict(self._modules.sanitize(weights))
        except CheckpointError as error:
            raise error.prefixed(self._checkpoint.path) from None
        except Exception as error:  # a missing tensor is a KeyError in mlx_lm's code
            kind = self._checkpoint.hf_config.get("model_type")
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{self._checkpoint.path}: mlx_lm can't read this {kind} model: {problem}") from error
