"""The gated delta rule (Yang et al. 2025, "Gated Delta Networks"): linear attention whose state forgets and corrects.

The state of a head, `[D_k, D_v]`, decays with each token, and what it says of the token's key is corrected:
S ← g·S + β·kᵀ(v - k·g·S). The token's output is q·S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cached
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.linear import FusedProjections, Linear
from mlxlm.model.norms import RMSNorm
from mlxlm.model.short_conv import CausalConv1d

_CHUNK = 64  # tokens whose updates are computed at once
_NORM_EPS = 1e-6  # of the norms of queries and keys


def into_chunks(x: mx.array, axis: int) -> mx.array:
    """Divide T positions, along an axis, into chunks: `[..., T, ...]` to `[..., N, C, ...]`, float32.

    C is a power of two; zeros follow the last position.
    """
    T, size = x.shape[axis], 1
    while size < min(T, _CHUNK):
        size *= 2
    x = mx.pad(x.astype(mx.float32), [(0, -T % size if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def chunk_decays(log_decay: mx.array, segment_ids: mx.array | None) -> tuple[mx.array, ...]:
    """Compute how much of a state is left between positions.

    Args:
        log_decay: Log of the decay with each token, `[B, ..., N, C]`, of N chunks.
        segment_ids: int `[B, T]`, ascending: nothing is left between documents.

    Returns:
        What is left of the state before the chunk after each token, `[B, ..., N, C]`; of each token at the chunk's end,
        `[B, ..., N, C]`; of the state before the chunk at its end, `[B, ..., N, 1]`; and of each token's own part (last
        axis) after each other, `[B, ..., N, C, C]`.
    """
    B, *heads, N, size = log_decay.shape
    index = mx.arange(size)
    visible = index[:, None] >= index
    from_start = mx.exp(mx.cumsum(log_decay, axis=-1))
    through = from_start[..., -1:]
    # Sums over each span: differences of the sums from the start would lose digits where a decay is strong.
    spans = mx.cumsum(mx.where(index[:, None] > index, log_decay[..., None], 0), axis=-2)
    if segment_ids is not None:
        pad = N * size - segment_ids.shape[1]
        ids = mx.pad(segment_ids, [(0, 0), (0, pad)], mode="edge").reshape(B, *[1] * len(heads), N, size)
        before = mx.concatenate([ids[..., :1, :1], ids[..., :-1, -1:]], axis=-2)
        visible = visible & (ids[..., None] == ids[..., None, :])
        from_start = mx.where(ids == before, from_start, 0)
        through = mx.where(ids[..., -1:] == before, through, 0)
    between = mx.exp(mx.where(visible, spans, -mx.inf))
    return from_start, between[..., -1, :], through, between


@mx.custom_function
def inverse(lower: mx.array) -> mx.array:
    """Invert I + `lower`, of strictly lower triangular matrices `[..., C, C]`; C is a power of two.

    The inverses of the diagonal blocks of size 1, 2, 4, ... are combined in pairs: the block below two of them, B, is
    -Y·B·X in the inverse. As exact as forward substitution, with products instead of C dependent steps.
    """
    size = lower.shape[-1]
    result = mx.broadcast_to(mx.eye(size, dtype=lower.dtype), lower.shape)
    for mask in _pair_masks(size):
        result = result - result @ mx.where(mask, lower, 0) @ result
    return result


@inverse.vjp
def _inverse_vjp(_primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    transposed = output.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)


@cached
def _pair_masks(size: int) -> list[mx.array]:
    """For each block size below `size`, the blocks below the diagonal that join two blocks of this size."""
    index = mx.arange(size)
    rows, columns = index[:, None], index[None]
    masks = []
    while size > 1:
        size //= 2
        masks.append((rows // (2 * size) == columns // (2 * size)) & (rows // size > columns // size))
    masks.reverse()
    mx.eval(masks)
    return masks


def gated_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> tuple[mx.array, mx.array, Callable[[int], mx.array]]:
    """Apply the gated delta rule to T tokens, chunk by chunk, in float32.

    Within a chunk, the corrections of its tokens are the solution of a triangular system (section 3.3 of the paper).

    Args:
        queries: `[B, H, T, D_k]`, normalized and scaled.
        keys: `[B, H, T, D_k]`, normalized.
        values: `[B, H, T, D_v]`.
        log_decay: log g, `[B, H, T]`, at most 0.
        beta: `[B, H, T]`, from 0 to 1.
        state: `[B, H, D_k, D_v]` before the first token; None: zeros.
        segment_ids: int `[B, T]`, ascending: the state is zeros before each document.

    Returns:
        The outputs `[B, H, T, D_v]`, the state after the last token, and a function that returns it after the first n
        tokens, 1 to 64.
    """
    B, H, T, K = keys.shape
    queries, keys, values, log_decay, beta = (into_chunks(x, 2) for x in (queries, keys, values, log_decay, beta))
    from_start, to_end, through, decay = chunk_decays(log_decay, segment_ids)
    index = mx.arange(keys.shape[3])
    weighted = keys * beta[..., None]
    solve = inverse(mx.where(index[:, None] > index, weighted @ keys.swapaxes(-1, -2) * decay, 0))
    updates = solve @ (values * beta[..., None])
    corrections = solve @ (weighted * from_start[..., None])
    scores = queries @ keys.swapaxes(-1, -2) * decay
    queries, weighted = queries * from_start[..., None], (keys * to_end[..., None]).swapaxes(-1, -2)
    if state is None:
        state = mx.zeros((B, H, K, values.shape[-1]))
    outputs, changes, first_state = [], [], state
    for n in range(keys.shape[2]):
        new = updates[:, :, n] - corrections[:, :, n] @ state
        changes.append(new)
        outputs.append(queries[:, :, n] @ state + scores[:, :, n] @ new)
        state = state * through[:, :, n, :, None] + weighted[:, :, n] @ new

    def state_after(n: int) -> mx.array:
        kept = first_state * from_start[:, :, 0, n - 1, None, None]
        added = keys[:, :, 0, :n] * decay[:, :, 0, n - 1, :n, None]
        return kept + added.swapaxes(-1, -2) @ changes[0][:, :, :n]

    return mx.concatenate(outputs, axis=2)[:, :, :T], state, state_after


def gated_delta_step(
    query: mx.array, key: mx.array, value: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Apply the gated delta rule to one token; see `gated_delta_rule` for the arguments, here without T."""
    decayed = state * mx.exp(log_decay)[..., None, None]
    change = (value - (key[..., None, :] @ decayed).squeeze(-2)) * beta[..., None]
    state = decayed + key[..., None] * change[..., None, :]
    return (query[..., None, :] @ state).squeeze(-2), state


class GatedDeltaNet(FusedProjections):
    """The gated delta rule with a convolution before it, and a gated norm after it (Qwen3-Next).

    Args:
        config: The model's configuration.
        layer: Index of the layer.

    Attributes:
        state_shapes: Of the arrays in its cache, for one row: those of the convolution, and the state of the rule.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        hidden = config.hidden_size
        self.heads: int = config.linear_num_value_heads  # type: ignore[assignment]
        self.key_heads: int = config.linear_num_key_heads  # type: ignore[assignment]
        self.key_dim: int = config.linear_key_head_dim  # type: ignore[assignment]
        self.value_dim: int = config.linear_value_head_dim  # type: ignore[assignment]
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        sizes = (keys, keys, values, values, self.heads, self.heads)
        for name, size in zip("qkvzba", sizes, strict=True):
            self[f"in_proj_{name}"] = Linear(hidden, size, bias=False)
        self.conv1d = CausalConv1d(2 * keys + values, config.linear_conv_kernel_dim)
        self.state_shapes = [*self.conv1d.state_shapes, (self.heads, self.key_dim, self.value_dim)]
        mixed = 2 * keys + values  # what is convolved; z, b and a follow
        self._ends = [mixed, mixed + values, mixed + values + self.heads]
        self.dt_bias, self.A_log = mx.ones((self.heads,)), mx.zeros((self.heads,))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, hidden, bias=False)

    def _projections(self) -> dict[str, list[nn.Module]]:
        return {"inputs": [self[f"in_proj_{name}"] for name in "qkvzba"], "output": [self.out_proj]}

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
        if is_step:
            mixed, gate, b, a = mx.split(self._fused.inputs(x), self._ends, axis=-1)
        else:
            *qkv, gate, b, a = (project(x) for project in self._projections()["inputs"])
            mixed = mx.concatenate(qkv, axis=-1)
        mixed = nn.silu(self.conv1d(mixed, cache, segment_ids)).astype(mx.float32)  # keys of padding are 0
        queries_keys, values = mx.split(mixed, [2 * self.key_heads * self.key_dim], axis=-1)
        queries, keys = mx.split(self._normalized(queries_keys), 2, axis=-2)
        queries = queries * self.key_dim**-0.5
        values = values.reshape(*values.shape[:-1], self.heads, self.value_dim)
        beta = mx.sigmoid(b.astype(mx.float32))
        log_decay = -mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(a.astype(mx.float32) + self.dt_bias)
        last = len(self.state_shapes) - 1
        state = None if cache is None else cache[last]
        if is_step:
            out, state = gated_delta_step(queries, keys, values, log_decay, beta, state)
        else:
            q, k, v, g, w = (y.swapaxes(1, 2) for y in (queries, keys, values, log_decay, beta))
            out, state, state_after = gated_delta_rule(q, k, v, g, w, state, segment_ids)
            out = out.swapaxes(1, 2)
            if cache is not None:
                cache.set_after(last, state_after)
        if cache is not None:
            cache[last] = state
        out = self.norm(out).reshape(gate.shape) * nn.silu(gate.astype(mx.float32))
        return (self._fused.output if is_step else self.out_proj)(out.astype(x.dtype))

    def _normalized(self, x: mx.array) -> mx.array:
        """Divide the queries and keys of each head by their norm: `[..., 2 · H, D_k]`, those of a key head repeated."""
        x = x.reshape(*x.shape[:-1], 2 * self.key_heads, self.key_dim)
        x = mx.fast.rms_norm(x, None, _NORM_EPS / self.key_dim) * self.key_dim**-0.5
        return x if self.heads == self.key_heads else mx.repeat(x, self.heads // self.key_heads, axis=-2)
