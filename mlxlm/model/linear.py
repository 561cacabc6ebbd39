"""Projections."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.kernels.eval_points import eval_point


class Linear(nn.Linear):
    """x · weightᵀ + bias, whose gradient by the weight lies in memory as the weight does.

    MLX's lies transposed: an optimizer on a CPU, which goes through weight, gradient and moments at once, then takes
    a fifth more time.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """x `[..., input]` -> `[..., output]`"""
        if not (ON_CPU and self.training):
            return super().__call__(x)
        out = eval_point(project(x, self.weight))
        return out + self.bias if "bias" in self else out


@mx.custom_function
def project(x: mx.array, weight: mx.array) -> mx.array:
    """x `[..., input]` · weightᵀ, weight `[output, input]`"""
    return x @ weight.T


@project.vjp
def _project_vjp(primals, cotangent, _output):
    x, weight = primals
    # In this order: what only the gradient by the weight needs is let go of before the gradient goes on.
    by_weight = eval_point(cotangent.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1]))
    return eval_point(cotangent @ weight), by_weight
