"""Gradient checkpointing: recompute a layer's activations for the gradient instead of keeping them.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from mlxlm.backend.mlx import mx, tree_flatten, tree_unflatten
from mlxlm.model.block import Block


def checkpointed_layer(
    layer: Block, residual: mx.array, hidden_states: mx.array | None, segment_ids: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    """Apply a layer, keeping only its inputs and outputs for the gradient.

    Unlike with `mx.checkpoint`, both passes draw the same dropout masks, and the second pass waits until the gradient
    reaches the layer, so that the activations of one layer exist at a time.
    """
    key = mx.random.randint(0, 1 << 31, (2,), dtype=mx.uint32) if layer.dropout.active else None
    names, weights = zip(*tree_flatten(layer.trainable_parameters()), strict=True)
    inputs = [residual] if hidden_states is None else [residual, hidden_states]
    fixed = [x for x in (segment_ids, key) if x is not None]

    def forward(differentiable: list[mx.array], others: list[mx.array]) -> list[mx.array]:
        others = list(others)
        before = layer.trainable_parameters()
        layer.update(tree_unflatten(list(zip(names, differentiable, strict=False))))
        where = None if segment_ids is None else others.pop(0)
        layer.dropout.set_key(others[0] if others else None)
        arrays = differentiable[len(names) :]
        out = layer(arrays[0], arrays[1] if len(arrays) > 1 else None, None, where)
        layer.dropout.set_key(None)
        layer.update(before)
        return [x for x in out if x is not None]

    count = len(names) + len(inputs)

    @mx.custom_function
    def run(*arrays):
        return tuple(forward(list(arrays[:count]), list(arrays[count:])))

    @run.vjp
    def run_vjp(primals, cotangents, _outputs):
        cotangents = list(cotangents) if isinstance(cotangents, tuple | list) else [cotangents]
        primals = mx.depends(list(primals), cotangents)
        others = primals[count:]
        _, gradients = mx.vjp(lambda *xs: forward(list(xs), others), primals[:count], cotangents)
        # Free what the weights' gradients need before the layer below starts.
        below = mx.depends(gradients[len(names) :], gradients[: len(names)])
        return (*gradients[: len(names)], *below, *(mx.zeros_like(x) for x in others))

    out = run(*weights, *inputs, *fixed)
    return out if len(out) == 2 else (out[0], None)
