"""Parameters, FLOPs and cache sizes of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxlm.config.components import NORMS, POSITIONS

if TYPE_CHECKING:
    from mlxlm.config.model_config import ModelConfig

# The groups of parameters that are matrices of a layer: each token is multiplied by them.
MATRICES = ("query", "key", "value", "output", "feed_forward")


def count_parameters(c: ModelConfig) -> dict[str, int]:
    """Number of parameters by group, over all layers. A tied head is 0, so that nothing is counted twice."""
    hidden, layers = c.hidden_size, c.num_hidden_layers
    queries, keys = c.head_dim * c.num_attention_heads, c.head_dim * c.num_key_value_heads
    positions = c.max_position_embeddings + c.position_offset if POSITIONS[c.positions].trainable else 0
    return {
        "embedding": c.vocab_size * hidden,
        "positions": positions * hidden,
        "query": layers * hidden * queries,
        "key": layers * hidden * keys,
        "value": layers * hidden * keys,
        "output": layers * queries * hidden,
        "feed_forward": layers * (3 if c.mlp_gated else 2) * hidden * c.intermediate_size,
        "norms": _norm_parameters(c),
        "biases": layers * _layer_biases(c),
        "head": 0 if c.tie_word_embeddings else c.vocab_size * hidden,
    }


def _norm_parameters(c: ModelConfig) -> int:
    placement, d = c.layer_norms, c.head_dim
    norms = c.num_hidden_layers * len(placement.names) + (not placement.after_addition) + c.embedding_norm
    qk_norms = {None: 0, "head": 2 * d, "projection": d * (c.num_attention_heads + c.num_key_value_heads)}
    return norms * c.hidden_size * NORMS[c.norm].vectors + c.num_hidden_layers * qk_norms[c.qk_norm]


def _layer_biases(c: ModelConfig) -> int:
    """Biases of one layer's projections."""
    qkv = c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads) if c.attention_bias else 0
    output_bias = c.attention_bias if c.attention_out_bias is None else c.attention_out_bias
    feed_forward = (2 if c.mlp_gated else 1) * c.intermediate_size + c.hidden_size if c.mlp_bias else 0
    return qkv + (c.hidden_size if output_bias else 0) + feed_forward


def forward_flops(c: ModelConfig, keys: float) -> dict[str, float]:
    """Floating-point operations of the forward pass for one token, 2 per multiply-add.

    Only matrix products are counted; norms, activations and the softmax are a few tenths of a percent of them.

    Args:
        c: The configuration.
        keys: Number of keys that the token attends to, summed over layers (see `attended_keys`).
    """
    parameters = count_parameters(c)
    attention = 2 * c.num_attention_heads * c.head_dim * keys
    return {
        "projections": 2 * (parameters["query"] + parameters["key"] + parameters["value"]),
        "scores": attention,
        "scores_values": attention,
        "output": 2 * parameters["output"],
        "feed_forward": 2 * parameters["feed_forward"],
        "head": 2 * c.hidden_size * c.vocab_size,
    }


def attended_keys(c: ModelConfig, context_length: float) -> float:
    """Number of keys that the last of `context_length` tokens attends to, summed over layers and limited by windows."""
    return sum(min(context_length, window or context_length) for window in _windows(c))


def mean_attended_keys(c: ModelConfig, length: int) -> float:
    """Mean of `attended_keys` over the tokens of a text: row i of a causal mask has i keys, or the window's."""

    def mean(window: int | None) -> float:
        limit = min(window or length, length)
        return (limit * (limit + 1) / 2 + (length - limit) * limit) / length

    return sum(mean(window) for window in _windows(c))


def layer_activations(c: ModelConfig) -> int:
    """Number of values per token that the operations of a layer produce.

    The residual before either sublayer and its norms; queries, keys, values and attention's output; gate, up and their
    product.
    """
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    inner = (3 if c.mlp_gated else 2) * c.intermediate_size
    return (2 + len(c.layer_norms.names)) * c.hidden_size + 2 * queries + 2 * keys + inner


def kv_cache_values(c: ModelConfig, context_length: int) -> int:
    """Number of values in the key-value cache of one sequence.

    A layer with a window stores at most the window, its slack and its spare positions.
    """
    tokens = sum(
        context_length if window is None else min(context_length, window + window_slack(window) + window_spare(window))
        for window in _windows(c)
    )
    return 2 * c.num_key_value_heads * c.head_dim * tokens


def window_slack(window: int) -> int:
    """Tokens that a cache keeps beyond a window, so that an answer can be trimmed without a new prefill.

    A quarter of the window, between 64 and 1,024.
    """
    return max(64, min(1024, window // 4))


def window_spare(window: int) -> int:
    """Further positions in the cache, so that its tokens are rarely moved to the front of the buffers."""
    return max(64, window // 8)


def _windows(c: ModelConfig) -> list[int | None]:
    return [c.window(layer) for layer in range(c.num_hidden_layers)]
