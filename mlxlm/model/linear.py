"""Linear projections."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.kernels.eval_points import eval_point


class Linear(nn.Linear):
    """x · weightᵀ + bias, with a weight gradient in the memory layout of the weight.

    MLX's gradient is transposed in memory, with which an optimizer on a CPU takes a fifth more time.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Project `x` `[..., input]` to `[..., output]`."""
        if not (ON_CPU and self.training):
            return super().__call__(x)
        out = eval_point(project(x, self.weight))
        return out + self.bias if "bias" in self else out


@mx.custom_function
def project(x: mx.array, weight: mx.array) -> mx.array:
    """Multiply `x` `[..., input]` by the transpose of `weight` `[output, input]`."""
    return x @ weight.T


@project.vjp
def _project_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    x, weight = primals
    # In this order, the arrays that only the weight's gradient needs are freed first.
    weight_gradient = eval_point(cotangent.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1]))
    return eval_point(cotangent @ weight), weight_gradient
