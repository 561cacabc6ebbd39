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
    inputs = (residual, hidden_states, segment_ids, key)
    count = len(names) + (1 if hidden_states is None else 2)  # arrays with a gradient

    def forward(*arrays: mx.array) -> tuple[mx.array, ...]:
        rest = iter(arrays[len(names) :])
        own_residual, own_hidden_states, ids, own_key = (None if x is None else next(rest) for x in inputs)
        before = layer.trainable_parameters()
        layer.update(tree_unflatten(list(zip(names, arrays, strict=False))))
        layer.dropout.set_key(own_key)
        out = layer(own_residual, own_hidden_states, None, ids)
        layer.dropout.set_key(None)
        layer.update(before)
        return tuple(x for x in out if x is not None)

    run = mx.custom_function(forward)

    @run.vjp
    def run_vjp(primals: list[mx.array], cotangents: list[mx.array], _outputs: list[mx.array]) -> tuple[mx.array, ...]:
        primals = mx.depends(list(primals), list(cotangents))
        others = primals[count:]
        _, gradients = mx.vjp(lambda *xs: forward(*xs, *others), primals[:count], list(cotangents))
        # Free what the weights' gradients need before the layer below starts.
        below = mx.depends(gradients[len(names) :], gradients[: len(names)])
        return (*gradients[: len(names)], *below, *(mx.zeros_like(x) for x in others))

    out = run(*weights, *(x for x in inputs if x is not None))
    return out if len(out) == 2 else (out[0], None)
