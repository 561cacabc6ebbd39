"""What rounding each matrix costs, from one run forward and one backward with one layer in memory.

To second order, weights W + ΔW instead of W cost a KL divergence of ½ ΔW · F ΔW with the Fisher information F. For
each matrix, two diagonals of F are measured: the mean squares of its inputs, and those of the gradients at its outputs
(the diagonals of K-FAC's factors, Martens and Grosse 2015, arXiv:1503.05671). The rest of F can be left out, because
rounding errors of different weights are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.quantization import Format
from mlxlm.quantize.calibrate import get_submodule, input_stats, intercepting
from mlxlm.quantize.gptq import damped_cholesky
from mlxlm.quantize.layers import Layers, layers_of
from mlxlm.quantize.quantization_plan import Matrix
from mlxlm.quantize.rtn import dequantized, quantize_rtn
from mlxlm.utils.errors import CheckpointError

# Matrix -> format -> increase of the KL divergence, in nats per token, if only this matrix is quantized.
Sensitivities = Mapping[str, Mapping[Format, float]]

TOKENS = 2048
WINDOW_TOKENS = 128  # shorter than for calibration: the logits of a window are in memory at once
_DAMPING = 0.1  # of moments of fewer tokens than calibration has
_ROWS = 256  # of a matrix that are rounded, drawn by importance
_MIN_COST = 1e-12  # nats per token: matrices without a measurable cost get more bits, too, if there is room


def estimate_sensitivities(
    checkpoint: WritableCheckpoint,
    formats: Mapping[Matrix, Sequence[Format]],
    windows: np.ndarray,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    compensated: bool = False,
) -> Sensitivities:
    """Estimate the KL divergence that each matrix costs in each format.

    Memory: one layer with its gradients, and the hidden states of `TOKENS` tokens before each layer.

    Args:
        checkpoint: A model in 16 bits.
        formats: The formats to try for each matrix.
        windows: Tokens, int `[N, T]`.
        progress: Called as `progress(done, total)` after each layer, forward and backward.
        compensated: Whether columns compensate for each other's errors, as in GPTQ; else they are rounded to nearest.

    Returns:
        The costs of matrices in layers, of the embedding and of the head. Others can't be measured and are left out.

    Raises:
        ArgumentError: The model doesn't run as one layer after another.
        CheckpointError: It has no gradients, or they are not finite.
    """
    model, tokens = layers_of(checkpoint), _short_windows(windows)
    costs, total = _Costs(formats, tokens.size), 2 * len(model.names)
    states = list(model.embed([mx.array(tokens)]))
    for index in range(len(model.names)):
        states.append(model.run(model.load(index), index, 0, states[-1]))
        mx.eval(states[-1])
        mx.clear_cache()
        progress(index + 1, total)
    last, first = states.pop(), states[0]
    try:
        gradient, logit_squares = _head_gradients(model, last)
        for module, x in model.head_inputs(0, last).items():
            weight = checkpoint.tensors[f"{module}.weight"]
            if weight.shape[0] == len(logit_squares):
                share = _remaining_share(x) if compensated else 1.0
                costs.add(module, weight.read(), share * logit_squares, _squares(x) / tokens.size)
        for index, name in reversed(list(enumerate(model.names))):
            layer = model.load(index)
            if isinstance(checkpoint, ModuleCheckpoint):
                layer.train()  # recurrent layers have kernels without a gradient for inference
            run = partial(model.run, layer, index, 0)
            gradient, found = _backward(layer, run, states.pop(), gradient, compensated)
            for matrix, rows, columns in found:
                costs.add(f"{name}.{matrix}", get_submodule(layer, matrix).weight, rows, columns)
            del layer  # before the next one is read
            mx.clear_cache()
            progress(total - index, total)
    except (RuntimeError, ValueError) as error:  # an operation without a gradient
        hint = "a recipe, or the same bits for all matrices"
        raise CheckpointError(f"the choice of bits needs the gradients of the model: {error}", hint) from None
    tables = {name: checkpoint.tensors[f"{name}.weight"] for name in model.tables}
    tables = {name: tensor for name, tensor in tables.items() if tensor.shape[1] == first.shape[-1]}
    if tables:
        name = max(tables, key=lambda name: tables[name].shape[0])  # a smaller one has positions
        weight = tables[name].read()
        counts = np.bincount(tokens.reshape(-1), minlength=len(weight))
        scale = (mx.square(as_float32(first)).sum() / mx.square(as_float32(weight[mx.array(tokens)])).sum()).item()
        costs.add(name, weight, scale * counts / tokens.size, _squares(gradient))
    return costs.result()


def _short_windows(windows: np.ndarray) -> np.ndarray:
    """`TOKENS` tokens, or all if there are fewer, in windows of up to `WINDOW_TOKENS` spread over the text."""
    length = min(WINDOW_TOKENS, windows.shape[1])
    count = max(1, min(TOKENS, windows.size) // length)
    starts = np.linspace(0, windows.size - length, count).astype(int)
    return np.stack([windows.reshape(-1)[start : start + length] for start in starts])


def _head_gradients(model: Layers, state: mx.array) -> tuple[mx.array, np.ndarray]:
    """Gradients of the log-likelihood of tokens drawn from the model.

    Their mean square is the diagonal of the Fisher information.

    Args:
        model: The model.
        state: Hidden state after the last layer `[B, T, hidden]`.

    Returns:
        The gradients of `state`, and the squares of those of the logits, sums over tokens, `[V]`.
    """
    gradients, squares, key = [], mx.array(0.0), mx.random.key(0)

    def negative_log_likelihood(state: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        logits = model.logits(state).astype(mx.float32)
        drawn = mx.random.categorical(mx.stop_gradient(logits), key=key)
        chosen = mx.take_along_axis(logits, drawn[..., None], axis=-1).squeeze(-1)
        return (mx.logsumexp(logits, axis=-1) - chosen).sum(), logits

    for window, own_key in zip(state, mx.random.split(key, len(state)), strict=True):
        (_, logits), gradient = mx.value_and_grad(negative_log_likelihood)(window[None], own_key)
        p = mx.softmax(logits, axis=-1)
        squares = squares + (p * (1 - p)).sum(axis=(0, 1))
        gradients.append(gradient)
        mx.eval(gradient, squares)
    return mx.concatenate(gradients), np.array(squares, np.float64)


def _backward(
    layer: nn.Module,
    run: Callable[[mx.array], mx.array],
    state: mx.array,
    gradient: mx.array,
    compensated: bool,
) -> tuple[mx.array, list[tuple[str, np.ndarray, np.ndarray]]]:
    """Propagate gradients through a layer.

    Args:
        layer: The layer.
        run: Runs it.
        state: Its input.
        gradient: Of its output.
        compensated: See `estimate_sensitivities`.

    Returns:
        The gradient of `state`; and for each call of a linear layer (`intercepting`) its name, the squares of the row's
        factor and those of the column's: of the outputs' gradients, sums over tokens, and of the inputs, means over
        tokens with the size of these gradients as weights. Rows are outputs, unless it was called with transpose=False.
    """
    calls: list[tuple[str, bool, mx.array, mx.array]] = []  # name, transposed, input, output
    zeros: list[mx.array] = []  # added to the outputs, to get the gradients there

    def call(
        name: str, _: nn.Module, original: Callable[..., mx.array], x: mx.array, *args: Any, **options: Any
    ) -> mx.array:
        output = original(x, *args, **options)
        calls.append((name, not options.get("transpose", True), x, output))
        return output + zeros[len(calls) - 1] if zeros else output

    def with_zeros(state: mx.array, *added: mx.array) -> mx.array:
        calls.clear()
        zeros[:] = added
        return run(state)

    with intercepting(layer, call):
        run(state)  # for the shapes: it isn't evaluated
        primals = [state, *(mx.zeros_like(output) for *_, output in calls)]
        _, (below, *gradients) = mx.vjp(with_zeros, primals, [gradient])
    found, shares = [], dict[int, float]()
    for (name, transposed, x, _), output_gradient in zip(calls, gradients, strict=True):
        squares = mx.square(as_float32(output_gradient))
        sizes = squares.sum(axis=-1, keepdims=True)
        outputs = squares.reshape(-1, squares.shape[-1]).sum(axis=0)
        inputs = (sizes * mx.square(as_float32(x))).reshape(-1, x.shape[-1]).sum(axis=0)
        inputs = inputs / mx.maximum(sizes.sum(), 1e-30)
        rows, columns = (inputs, outputs) if transposed else (outputs, inputs)
        share = 1.0
        if compensated and get_submodule(layer, name).weight.ndim == 2:
            if id(x) not in shares:  # query, key and value read the same array
                shares[id(x)] = _remaining_share(x)
            share = shares[id(x)]
        found.append((name, share * np.array(rows, np.float64), np.array(columns, np.float64)))
    mx.eval(below)
    return below, found


def _remaining_share(x: mx.array) -> float:
    """The share of a matrix's squared output error that is left by GPTQ, of the one by rounding to nearest.

    The mean of LDLQ's conditional variances of the inputs `[..., width]` over the mean of their variances. For a model
    of 135M parameters with 4 bits, it makes of 0.42 an estimate of 0.137; 0.128 was measured.
    """
    moments = input_stats(x).moments
    mean = np.mean(np.diag(moments))
    if mean == 0:
        return 1.0
    factor = damped_cholesky(moments / mean, [_DAMPING])
    return float(np.square(np.diag(factor)).mean() / (1 + _DAMPING))


def _squares(x: mx.array) -> np.ndarray:
    """Sum of the squares of each channel, float64 `[width]`."""
    return np.array(mx.square(as_float32(x)).reshape(-1, x.shape[-1]).sum(axis=0), np.float64)


class _Costs:
    """Adds up what matrices cost.

    Args:
        formats: The formats to try for each matrix.
        tokens: Number of tokens that the factors are sums over.
    """

    def __init__(self, formats: Mapping[Matrix, Sequence[Format]], tokens: int):
        self._formats, self._tokens = formats, tokens
        self._matrices = {module: matrix for matrix in formats for module in matrix.modules}
        self._costs: dict[str, dict[Format, float]] = {}

    def add(self, module: str, weight: mx.array, rows: np.ndarray, columns: np.ndarray) -> None:
        """Add Σ rows · ΔW² · columns / 2 per token; of a stack of matrices the mean.

        Args:
            module: Its name.
            weight: `[..., rows, width]`.
            rows: Factor of each row.
            columns: Factor of each column.

        Raises:
            CheckpointError: Factors are not finite.
        """
        if (matrix := self._matrices.get(module)) is None:
            return
        if not (np.isfinite(rows).all() and np.isfinite(columns).all()):
            raise CheckpointError(f"the gradients of {module} are not finite", "another calibration text")
        flat, costs = weight.reshape(-1, weight.shape[-1]), self._costs.setdefault(matrix.name, {})
        total = rows.sum()
        bounds = np.cumsum(np.tile(rows, len(flat) // len(rows)))
        drawn = np.searchsorted(bounds, (np.arange(_ROWS) + 0.5) / _ROWS * bounds[-1]) if total else np.zeros(1, int)
        sample = flat[mx.array(np.minimum(drawn, len(flat) - 1))]
        factors = mx.array(columns.astype(np.float32))
        for fmt in self._formats[matrix]:
            error = dequantized(quantize_rtn(sample, fmt), fmt) - as_float32(sample)
            cost = total * (mx.square(error) @ factors).mean().item() / (2 * self._tokens)
            costs[fmt] = costs.get(fmt, 0.0) + cost

    def result(self) -> dict[str, dict[Format, float]]:
        """Cost by matrix and format."""
        return {
            name: {fmt: max(cost, _MIN_COST * 4.0**-fmt.bits) for fmt, cost in costs.items()}
            for name, costs in self._costs.items()
        }
