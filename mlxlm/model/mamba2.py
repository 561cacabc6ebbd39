"""Mamba 2 (Dao & Gu 2024, "Transformers are SSMs"): a state space layer whose scan is a product of matrices.

The state of a head, `[S, P]`, decays with each token by exp(-A·Δ), and the token's values are added to it:
H ← exp(-A·Δ)·H + Bᵀ(Δ·x). The token's output is C·H + D·x. B and C are the keys and queries of linear attention; the
heads of a group share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.config import ModelConfig
from mlxlm.model.gated_delta import chunk_decays, into_chunks
from mlxlm.model.linear import FusedProjections, Linear
from mlxlm.model.norms import RMSNorm, split_rms_norm
from mlxlm.model.short_conv import CausalConv1d


def state_space_scan(
    values: mx.array,
    log_decay: mx.array,
    keys: mx.array,
    queries: mx.array,
    state: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> tuple[mx.array, mx.array, Callable[[int], mx.array]]:
    """Scan a text, in chunks (section 6 of the paper); float32.

    Args:
        values: Δ·x, `[B, G, R, T, P]`, of the R heads of each of G groups.
        log_decay: -A·Δ, `[B, G, R, T]`.
        keys: B, `[B, G, 1, T, S]`.
        queries: C, `[B, G, 1, T, S]`.
        state: `[B, G, R, S, P]` before the first token; None: zeros.
        segment_ids: int `[B, T]`, ascending: the state is zeros before each document.

    Returns:
        The outputs `[B, G, R, T, P]`, the state after the last token, and a function that returns it after the first n
        tokens, 1 to 64.
    """
    T = values.shape[3]
    values, log_decay, keys, queries = (into_chunks(x, 3) for x in (values, log_decay, keys, queries))
    from_start, to_end, through, between = chunk_decays(log_decay, segment_ids)
    keys = keys.swapaxes(-1, -2)
    out = (queries @ keys * between) @ values
    added = keys @ (values * to_end[..., None])
    if state is None:
        state = mx.zeros_like(added[:, :, :, 0])
    states, first_state = [], state
    for n in range(added.shape[3]):
        states.append(state)
        state = state * through[:, :, :, n, :, None] + added[:, :, :, n]
    out = out + from_start[..., None] * (queries @ mx.stack(states, axis=3))

    def state_after(n: int) -> mx.array:
        kept = first_state * from_start[:, :, :, 0, n - 1, None, None]
        return kept + keys[:, :, :, 0, :, :n] @ (values[:, :, :, 0, :n] * between[:, :, :, 0, n - 1, :n, None])

    return mx.flatten(out, 3, 4)[:, :, :, :T], state, state_after


def state_space_step(
    values: mx.array, log_decay: mx.array, keys: mx.array, queries: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Read one token; see `state_space_scan` for the arguments, here without T."""
    state = state * mx.exp(log_decay)[..., None, None] + keys[..., None] * values[..., None, :]
    return (queries[..., None, :] @ state).squeeze(-2), state


class Mamba2(FusedProjections):
    """A Mamba 2 layer: a convolution, the scan, and a norm of the gated output, by group.

    Args:
        config: The model's configuration.
        layer: Index of the layer.

    Attributes:
        state_shapes: Of the arrays in its cache, for one row: those of the convolution, and the state.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        hidden, groups, heads = config.hidden_size, config.mamba_n_groups, config.mamba_n_heads or 0
        inner, keys = heads * (config.mamba_d_head or 0), groups * (config.mamba_d_state or 0)
        self.groups, self.limit = groups, config.time_step_limit
        self.in_proj = Linear(hidden, 2 * inner + 2 * keys + heads, bias=config.mamba_proj_bias)
        self._ends = [inner, 2 * inner + 2 * keys]  # of the gate, and of what is convolved; the time steps follow
        self.conv1d = CausalConv1d(inner + 2 * keys, config.mamba_d_conv, config.mamba_conv_bias)
        self._mixed_ends = [inner, inner + keys]
        state = (groups, heads // groups, config.mamba_d_state or 0, config.mamba_d_head or 0)
        self.state_shapes = [*self.conv1d.state_shapes, state]
        self.A_log, self.dt_bias, self.D = mx.zeros((heads,)), mx.ones((heads,)), mx.ones((heads,))
        self.norm = RMSNorm(inner, config.rms_norm_eps)
        self.out_proj = Linear(inner, hidden, bias=config.mamba_proj_bias)
        self._norm_group: ProcessGroup | None = None  # see `split`

    def split(self, process_group: ProcessGroup, whole: ModelConfig) -> None:
        """Have the part of the heads that this process has; the norm of a single group is over those of all."""
        self._norm_group = process_group if whole.mamba_n_groups == 1 else None

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Apply the layer.

        Args:
            x: `[B, T, hidden]`, or `[B, hidden]` in a decoding step, after `fuse`.
            cache: The layer's `RecurrentCache`.
            segment_ids: int `[B, T]`, the document of each position in packed rows. Not with a cache.

        Returns:
            The same shape as `x`.
        """
        is_step = x.ndim == 2
        gate, mixed, steps = mx.split((self._fused.inputs if is_step else self.in_proj)(x), self._ends, axis=-1)
        mixed = nn.silu(self.conv1d(mixed, cache, segment_ids)).astype(mx.float32)
        inputs, keys, queries = mx.split(mixed, self._mixed_ends, axis=-1)
        steps = nn.softplus(steps.astype(mx.float32) + self.dt_bias)
        if self.limit is not None:
            steps = mx.clip(steps, *self.limit)
        log_decay = -mx.exp(self.A_log.astype(mx.float32)) * steps
        by_head, groups = inputs.reshape(*steps.shape, -1), (*x.shape[:-1], self.groups)
        values = (by_head * steps[..., None]).reshape(*groups, -1, by_head.shape[-1])
        keys, queries = (y.reshape(*groups, 1, -1) for y in (keys, queries))
        log_decay = log_decay.reshape(*groups, -1)
        last = len(self.state_shapes) - 1
        state = None if cache is None else cache[last]
        if is_step:
            out, state = state_space_step(values, log_decay, keys, queries, state)
        else:
            v, d, k, q = (mx.moveaxis(y, 1, 3) for y in (values, log_decay, keys, queries))
            out, state, state_after = state_space_scan(v, d, k, q, state, segment_ids)
            out = mx.moveaxis(out, 3, 1)
            if cache is not None:
                cache.set_after(last, state_after)
        if cache is not None:
            cache[last] = state
        out = out.reshape(by_head.shape) + by_head * self.D[:, None]
        out = out.reshape(gate.shape) * nn.silu(gate.astype(mx.float32))
        if self._norm_group is None:
            out = mx.fast.rms_norm(out.reshape(*groups, -1), None, self.norm.eps)
        else:
            [out] = split_rms_norm([out], self.norm.eps, self._norm_group)
        out = out.reshape(gate.shape).astype(x.dtype) * self.norm.weight
        return (self._fused.output if is_step else self.out_proj)(out)
