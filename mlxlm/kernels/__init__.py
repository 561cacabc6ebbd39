"""Operations with more than one implementation: one contract each, and the choice of what runs here.

On a GPU these are MLX's own fused kernels. On the CPU backend, whose `exp` is a scalar 12 ns per element
and whose fused operations fall back to it, they are MLX graphs built on a vectorised `exp`.
"""

from mlxlm.kernels.attention import attention
from mlxlm.kernels.cross_entropy import cross_entropy
from mlxlm.kernels.swiglu import swiglu

__all__ = ["attention", "cross_entropy", "swiglu"]
