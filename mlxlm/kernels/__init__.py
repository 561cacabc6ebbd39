"""Operations with more than one implementation: one contract each, and the choice of what runs here.

Norms and attention have paths (see `dispatch`): MLX's operations, kernels of our own for Metal, blocks with
linear memory. On the CPU backend, whose `exp` is a scalar 12 ns per element, MLX's operations give way to
graphs built on a vectorised `exp`.
"""

from mlxlm.kernels.attention import attention
from mlxlm.kernels.cross_entropy import cross_entropy, linear_cross_entropy, log_softmax
from mlxlm.kernels.dispatch import use_kernels
from mlxlm.kernels.gelu import gelu, gelu_tanh
from mlxlm.kernels.quantized_kv import QuantizedKV
from mlxlm.kernels.rms_norm import add_rms_norm, rms_norm
from mlxlm.kernels.swiglu import swiglu

__all__ = [
    "QuantizedKV",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "gelu",
    "gelu_tanh",
    "linear_cross_entropy",
    "log_softmax",
    "rms_norm",
    "swiglu",
    "use_kernels",
]
