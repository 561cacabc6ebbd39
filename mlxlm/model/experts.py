"""A mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al. 2017).

Tokens are sorted by expert and padded to blocks of one expert, so that a product reads the weights of an expert once
for many tokens. All shapes are fixed, so that nothing waits for the router's choice (Gale et al. 2022, "MegaBlocks").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.config import ModelConfig
from mlxlm.kernels import rms_norm, with_fused_gradients
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.quantized_matmul import multiplies_on_cpu
from mlxlm.model.feed_forward import FeedForward, make_activation
from mlxlm.model.linear import Linear, QuantizedMatrices, multiply

# Pairs of a token and an expert from which they are sorted; fewer are multiplied in any order, as in mlx_lm.
_SORT_FROM = 32 if ON_CPU else 64
# Rows of a block on a CPU: for 8,192 rows and 8 experts of 256 x 512, blocks of 32 take a quarter of the time of
# single rows, and as long as one dense product. A product of 2 to 8 rows takes longer than as many of one row, where a
# weight is in the cache for the next row of its expert. A GPU's kernels take sorted single rows.
_MIN_BLOCK, _MAX_BLOCK = (16, 64) if ON_CPU else (1, 1)


class Blocks(NamedTuple):
    """Where the pairs of a token and one of its experts are in blocks of one expert.

    Attributes:
        size: Rows of a block.
        experts: Expert of each block, ascending, int `[N]`.
        pairs: Index of the pair in each row of the blocks, int `[N * size]`; 0 in padding.
        used: Whether a row is no padding, bool `[N * size]`.
        rows: Row of each pair, int `[T, K]`.
    """

    size: int
    experts: mx.array
    pairs: mx.array
    used: mx.array
    rows: mx.array


def group_by_expert(chosen: mx.array, num_experts: int) -> Blocks:
    """Group the pairs of tokens and their experts `chosen`, int `[T, K]`, by expert."""
    flat, count = chosen.flatten(), chosen.size
    size = 1
    while size < _MAX_BLOCK and 2 * size * num_experts <= count:
        size *= 2
    size = size if size >= _MIN_BLOCK else 1
    order = mx.argsort(flat)
    if size == 1:
        rows = mx.argsort(order).reshape(chosen.shape)
        return Blocks(1, flat[order], order, mx.ones(count, mx.bool_), rows)
    counts = expert_counts(chosen, num_experts)
    blocks = (counts + size - 1) // size
    last_blocks = mx.cumsum(blocks)
    shift = size * (last_blocks - blocks) - (mx.cumsum(counts) - counts)
    sorted_rows = mx.arange(count) + shift[flat[order]]
    num_blocks = count // size + num_experts  # at most; those at the end may be padding only
    experts = (mx.arange(num_blocks)[:, None] >= last_blocks).sum(axis=1)
    experts = mx.minimum(experts, num_experts - 1)
    pairs, used = mx.zeros(num_blocks * size, order.dtype), mx.zeros(num_blocks * size, mx.bool_)
    pairs[sorted_rows], used[sorted_rows] = order, True
    return Blocks(size, experts, pairs, used, sorted_rows[mx.argsort(order)].reshape(chosen.shape))


@mx.custom_function
def _gather_tokens(x: mx.array, pairs: mx.array, rows: mx.array) -> mx.array:
    """The token of each row of the blocks, from `x` `[T, hidden]`."""
    return x[pairs // rows.shape[1]]


@_gather_tokens.vjp
def _gather_tokens_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, ...]:
    _, pairs, rows = primals
    return cotangent[rows].sum(axis=1), mx.zeros_like(pairs), mx.zeros_like(rows)  # without a scatter


@mx.custom_function
def _gather_pairs(y: mx.array, rows: mx.array, pairs: mx.array, used: mx.array) -> mx.array:
    """The outputs of each token's experts, `[T, K, hidden]`, from the rows of the blocks."""
    return y[rows]


@_gather_pairs.vjp
def _gather_pairs_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, ...]:
    _, rows, pairs, used = primals
    gradient = mx.where(used[:, None], cotangent.reshape(-1, cotangent.shape[-1])[pairs], 0)
    return gradient, mx.zeros_like(rows), mx.zeros_like(pairs), mx.zeros_like(used)


@mx.custom_function
def _multiply_blocks(x: mx.array, weight: mx.array, experts: mx.array) -> mx.array:
    """Multiply blocks `[N, size, input]` by the weights of their experts, of `[E, output, input]`, which ascend."""
    return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=True)


@_multiply_blocks.vjp
def _multiply_blocks_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, ...]:
    x, weight, experts = primals
    counts = mx.zeros(weight.shape[0], mx.uint32).at[experts].add(mx.array(x.shape[1], mx.uint32))
    ends = mx.cumsum(counts)
    segments = mx.stack([ends - counts, ends], axis=1)
    rows = cotangent.reshape(-1, weight.shape[1])
    weight_gradient = eval_point(mx.segmented_mm(rows.T, x.reshape(-1, weight.shape[2]), segments))
    x_gradient = mx.gather_mm(cotangent, weight, rhs_indices=experts, sorted_indices=True)
    return eval_point(x_gradient), weight_gradient, mx.zeros_like(experts)


class SwitchLinear(nn.Module):
    """A linear projection for each expert, with mlx_lm's name and weights `[E, output, input]`."""

    def __init__(self, inputs: int, outputs: int, num_experts: int, bias: bool):
        super().__init__()
        self.weight = mx.zeros((num_experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((num_experts, outputs))

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.weight.shape[0]

    def __call__(self, x: mx.array, experts: mx.array | Blocks) -> mx.array:
        """Project each token by its experts.

        Args:
            x: `[N, size, input]` for blocks, else `[T, 1, 1, input]` or `[T, K, 1, input]`.
            experts: The blocks, or int `[T, K]`.

        Returns:
            `[N, size, output]` or `[T, K, 1, output]`.
        """
        if self.training and isinstance(experts, Blocks):
            out = eval_point(_multiply_blocks(x, self.weight, experts.experts))
        else:
            out = mx.gather_mm(x, self.weight.swapaxes(-1, -2), **_indices(x, experts))
        return _add_bias(self, out, experts)

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine", **_options: Any) -> QuantizedSwitchLinear:
        """Quantize the weights of all experts."""
        return QuantizedSwitchLinear(self, group_size, bits, mode)


class QuantizedSwitchLinear(QuantizedMatrices):
    """`SwitchLinear` with quantized weights."""

    def __call__(self, x: mx.array, experts: mx.array | Blocks) -> mx.array:
        """Project each token by its experts; see `SwitchLinear`."""
        if isinstance(experts, Blocks):
            out = multiply(self, x, experts.experts)
        elif multiplies_on_cpu(self.group_size, self.mode):
            rows = mx.broadcast_to(x, (*experts.shape, 1, x.shape[-1]))
            out = multiply(self, rows.reshape(-1, 1, x.shape[-1]), experts.flatten()).reshape(*experts.shape, 1, -1)
        else:
            out = mx.gather_qmm(
                x, self.weight, self.scales, self.get("biases"), transpose=True, group_size=self.group_size,
                bits=self.bits, mode=self.mode, **_indices(x, experts),
            )  # fmt: skip
        return _add_bias(self, out, experts)


def _indices(x: mx.array, experts: mx.array | Blocks) -> dict[str, Any]:
    """The arguments of a gathered product. MLX would launch two kernels for the indices of `x` in each one."""
    if isinstance(experts, Blocks):
        return {"rhs_indices": experts.experts, "sorted_indices": True}
    return {"lhs_indices": _rows(*x.shape[:2], experts.shape[1]), "rhs_indices": experts}


@cache
def _rows(tokens: int, rows: int, used: int) -> mx.array:
    """The row for each use of a token, of which there is one or one for each use, uint32 `[T, K]`."""
    indices = mx.arange(tokens * rows, dtype=mx.uint32).reshape(tokens, rows)
    indices = mx.contiguous(mx.broadcast_to(indices, (tokens, used)))
    mx.eval(indices)
    return indices


def _add_bias(layer: nn.Module, out: mx.array, experts: mx.array | Blocks) -> mx.array:
    indices = experts.experts if isinstance(experts, Blocks) else experts
    return out + layer.bias[indices][..., None, :] if "bias" in layer else out


class SwitchMLP(nn.Module):
    """The feed-forwards of all experts."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        inner: int = config.moe_intermediate_size  # type: ignore[assignment]
        self.gated, self.activation = config.mlp_gated, make_activation(config)
        self.num_experts: int = config.num_experts  # type: ignore[assignment]
        if self.gated:
            self.gate_proj = SwitchLinear(hidden, inner, self.num_experts, bias)
        self.up_proj = SwitchLinear(hidden, inner, self.num_experts, bias)
        self.down_proj = SwitchLinear(inner, hidden, self.num_experts, bias)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Apply to each token of `x` `[T, hidden]` its experts `chosen`, int `[T, K]`: `[T, K, hidden]`."""
        if chosen.size < _SORT_FROM and not self.training:
            return self._apply(x.reshape(-1, 1, 1, x.shape[-1]), chosen).squeeze(-2)
        blocks = group_by_expert(chosen, self.num_experts)
        pairs, rows = blocks.pairs, blocks.rows
        x = _gather_tokens(x, pairs, rows) if self.training else x[pairs // rows.shape[1]]
        out = self._apply(x.reshape(-1, blocks.size, x.shape[-1]), blocks)
        out = out.reshape(-1, out.shape[-1])
        return _gather_pairs(out, rows, pairs, blocks.used) if self.training else out[rows]

    def _apply(self, x: mx.array, experts: mx.array | Blocks) -> mx.array:
        inputs = [self.gate_proj(x, experts), self.up_proj(x, experts)] if self.gated else [self.up_proj(x, experts)]
        activation = with_fused_gradients(self.activation) if self.training else self.activation
        return self.down_proj(activation(*inputs), experts)


class Router(Linear):
    """Chooses the experts of each token. Its outputs are scores in float32."""

    def __init__(self, config: ModelConfig):
        experts: int = config.num_experts  # type: ignore[assignment]
        super().__init__(config.hidden_size, experts, bias=config.router_bias)
        if config.router == "sigmoid":
            self.e_score_correction_bias = mx.zeros(experts)


class MixtureOfExperts(nn.Module):
    """A feed-forward of which each token uses a few experts, weighted by the router's scores, and a shared expert.

    Attributes:
        router_aux_loss: Coefficient of the load-balancing loss, whose gradient is added in training: the number of
            experts times the sum over experts of their share of tokens and their mean score, 1 if all have the same
            (Fedus et al. 2021, "Switch Transformers", equation 4).
        router_z_loss: Coefficient of the mean of the squared log of the sum of exp(router's outputs) (Zoph et al. 2022,
            "ST-MoE", equation 5).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.k: int = config.num_experts_per_tok  # type: ignore[assignment]
        self.router, self.normalized = config.router, config.norm_topk_prob
        self.n_group, self.topk_group = config.n_group, config.topk_group
        self.num_experts: int = config.num_experts  # type: ignore[assignment]
        self.scale = float(config.routed_scaling_factor)
        self.router_aux_loss = self.router_z_loss = 0.0
        self._counts: mx.array | None = None  # see `expert_load`
        self.gate, self.switch_mlp = Router(config), SwitchMLP(config)
        if config.enable_moe_block:
            self.eps, self.router_scale = float(config.rms_norm_eps), mx.ones(config.hidden_size)
            self.per_expert_scale = mx.ones(self.num_experts)
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = FeedForward(config, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def fuse(self) -> None:
        """Fuse the projections of the shared expert, for decoding steps."""
        if "shared_expert" in self:
            self.shared_expert.fuse()

    def unfuse(self) -> None:
        """Forget the fused projections."""
        if "shared_expert" in self:
            self.shared_expert.unfuse()

    def __call__(self, x: mx.array, router_input: mx.array | None = None) -> mx.array:
        """Apply the experts.

        Args:
            x: `[B, T, hidden]`, or `[B, hidden]` in a decoding step.
            router_input: What the router normalizes and reads, with `enable_moe_block`. Others read `x`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        read = tokens
        if router_input is not None:
            read = rms_norm(router_input, self.router_scale * x.shape[-1] ** -0.5, self.eps).reshape(tokens.shape)
        logits = self.gate(read).astype(mx.float32)
        scores = mx.softmax(logits, axis=-1) if self.router == "softmax" else mx.sigmoid(logits)
        chosen = mx.stop_gradient(self.choose(scores))
        if self._counts is not None:
            self._counts = self._counts + expert_counts(chosen, self.num_experts)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if self.normalized:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        if "per_expert_scale" in self:
            weights = weights * self.per_expert_scale[chosen]
        weights = (weights * self.scale)[:, None].astype(tokens.dtype)
        if self.router == "input_sigmoid":
            pairs = (weights.swapaxes(1, 2) * tokens[:, None]).reshape(-1, tokens.shape[1])
            out = self.switch_mlp(pairs, chosen.reshape(-1, 1)).reshape(*chosen.shape, -1).sum(axis=1)
        else:
            out = (weights @ self.switch_mlp(tokens, chosen)).squeeze(-2)
        if self.training and (self.router_aux_loss or self.router_z_loss):
            out = _with_loss(out, self._router_loss(logits, scores, chosen))
        out = out.reshape(x.shape)
        if "shared_expert" not in self:
            return out
        shared = self.shared_expert(x)
        return out + (mx.sigmoid(self.shared_expert_gate(x)) * shared if "shared_expert_gate" in self else shared)

    def choose(self, scores: mx.array) -> mx.array:
        """The experts of each token, int `[T, K]`, from the scores `[T, E]`."""
        if self.router == "sigmoid":
            scores = scores + self.gate.e_score_correction_bias
        if self.n_group > 1:  # those with the best expert (DeepSeek V2), or the largest sum of the two best ones (V3)
            groups = scores.reshape(-1, self.n_group, self.num_experts // self.n_group)
            count = min(2 if self.router == "sigmoid" else 1, groups.shape[-1])
            best = mx.topk(groups, count, axis=-1).sum(axis=-1)
            considered = mx.argpartition(-best, self.topk_group - 1, axis=-1)[..., : self.topk_group]
            mask = mx.zeros(best.shape, mx.bool_)
            mask = mx.put_along_axis(mask, considered, mx.array(True), axis=-1)
            scores = mx.where(mask[..., None], groups, -mx.inf).reshape(scores.shape)
        return mx.argpartition(scores, -self.k, axis=-1)[..., -self.k :]

    def _router_loss(self, logits: mx.array, scores: mx.array, chosen: mx.array) -> mx.array:
        """The losses of the router, times the number of tokens, as the loss of the model is a sum over tokens."""
        if self.router != "softmax":
            scores = scores / scores.sum(axis=-1, keepdims=True)
        share = expert_counts(chosen, self.num_experts) / chosen.size
        balance = self.num_experts * (share * scores.mean(axis=0)).sum()
        z = mx.logsumexp(logits, axis=-1).square().mean()
        return (self.router_aux_loss * balance + self.router_z_loss * z) * logits.shape[0]


def expert_counts(chosen: mx.array, num_experts: int) -> mx.array:
    """How many tokens go to each expert, int32 `[E]`."""
    return mx.zeros(num_experts, mx.int32).at[chosen.flatten()].add(1)


def mixtures_of(layers: Iterable[nn.Module]) -> list[MixtureOfExperts]:
    """The mixtures of experts of some layers."""
    modules = [module for layer in layers for module in (layer.mlp, layer.get("experts"))]
    return [module for module in modules if isinstance(module, MixtureOfExperts)]


def _relative_maximum(counts: mx.array) -> float:
    return (counts.max() / counts.mean()).item()


@contextmanager
def expert_load(layers: Iterable[nn.Module]) -> Iterator[Callable[[], float | None]]:
    """Count the tokens of each expert while a model runs.

    Yields:
        A function that returns the tokens of the busiest expert of any of the `layers`, relative to the mean of its
        layer: 1 if all are as busy. None without experts.
    """
    mixtures = mixtures_of(layers)
    for mixture in mixtures:
        mixture._counts = mx.zeros(mixture.num_experts, mx.int32)
    try:
        yield lambda: max((_relative_maximum(m._counts) for m in mixtures if m._counts is not None), default=None)
    finally:
        for mixture in mixtures:
            mixture._counts = None


@mx.custom_function
def _with_loss(out: mx.array, loss: mx.array) -> mx.array:
    """Return `out`, and add the gradient of `loss` in the backward pass, whatever the layers above do with `out`."""
    return out


@_with_loss.vjp
def _with_loss_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    return cotangent, mx.ones_like(primals[1])
