"""The weights of a model in memory as a quantized folder holds them, for tests of readers."""

from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.config.quantization import Format
from mlxlm.quantize.quantization_plan import decoder_matrices, uniform
from mlxlm.quantize.rtn import lazy_quantize
from mlxlm.quantize.source import cast_to_16bit


def quantized_weights(model: nn.Module, bits: int, group_size: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Weights by name, and the `quantization` entry of config.json."""
    tensors = {name: lazy_tensor(value) for name, value in tree_flatten(model.parameters())}
    plan = uniform(decoder_matrices(model.config, tensors), Format(bits, group_size))
    made = lazy_quantize(cast_to_16bit(tensors, mx.float16), plan)
    return {name: tensor.read() for name, tensor in made.items()}, plan.quantization_config()
