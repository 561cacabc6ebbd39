"""SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) · up, as in Llama's MLP."""

from __future__ import annotations

from functools import partial

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.kernels.exp import exp_nonpositive


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Compute silu(gate) · up elementwise. Both have the same shape and dtype."""
    if ON_CPU and gate.dtype == mx.float32:
        return _swiglu_cpu(gate, up)
    return _swiglu_fused(gate, up)


@partial(mx.compile, shapeless=True)
def _swiglu_fused(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@mx.custom_function
def _swiglu_cpu(gate: mx.array, up: mx.array) -> mx.array:
    return _forward(gate, exp_nonpositive(-mx.abs(gate)), up)


@_swiglu_cpu.vjp
def _swiglu_cpu_vjp(primals, cotangent, _output):
    gate, up = primals
    return _backward(gate, exp_nonpositive(-mx.abs(gate)), up, cotangent)


def _sigmoid(x: mx.array, e: mx.array) -> mx.array:
    """Return 1 / (1 + exp(-x)) from e = exp(-|x|), without overflow."""
    return mx.where(x >= 0, 1.0, e) / (1.0 + e)


@partial(mx.compile, shapeless=True)
def _forward(gate, e, up):
    return gate * _sigmoid(gate, e) * up


@partial(mx.compile, shapeless=True)
def _backward(gate, e, up, cotangent):
    s = _sigmoid(gate, e)
    silu = gate * s
    return cotangent * up * (s + silu * (1.0 - s)), cotangent * silu
