"""What a configuration comes to: parameters, floating-point operations and cached values, by part.

The one place that counts; `ModelConfig` and the planner both rest on it. Plain arithmetic on the fields of a
configuration, without MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxlm.config.model_config import ModelConfig

# The parts of a decoder's parameters, in the order in which a token meets them. `head` is 0 where it is tied to the
# embedding: no parameter is counted twice.
PARAMETER_GROUPS = (
    "embedding",
    "positions",
    "query",
    "key",
    "value",
    "output",
    "feed_forward",
    "norms",
    "biases",
    "head",
)
MATRICES = ("query", "key", "value", "output", "feed_forward")  # that every token is multiplied with, in each layer


def count_parameters(c: ModelConfig) -> dict[str, int]:
    """The parameters of each of PARTS, over all layers."""
    h, d, layers = c.hidden_size, c.head_dim, c.num_hidden_layers
    queries, keys = d * c.num_attention_heads, d * c.num_key_value_heads
    table = c.max_position_embeddings + c.position_offset if c.positions == "learned" else 0
    return {
        "embedding": c.vocab_size * h,
        "positions": table * h,
        "query": layers * h * queries,
        "key": layers * h * keys,
        "value": layers * h * keys,
        "output": layers * queries * h,
        "feed_forward": layers * (3 if c.mlp_gated else 2) * h * c.intermediate_size,
        "norms": _norms(c),
        "biases": layers * _biases(c),
        "head": 0 if c.tie_word_embeddings else c.vocab_size * h,
    }


def _norms(c: ModelConfig) -> int:
    """Weights of all norms, with the biases of LayerNorms."""
    d = c.head_dim
    in_layer = 1 if c.shared_norm else 4 if c.norm_placement == "both" else 2
    last = c.norm_placement != "post"  # there the last layer's own norm is the last one
    of_stream = (c.num_hidden_layers * in_layer + last + c.embedding_norm) * c.hidden_size
    of_heads = {None: 0, "head": 2 * d, "projection": d * (c.num_attention_heads + c.num_key_value_heads)}[c.qk_norm]
    return of_stream * (2 if c.norm == "layer" else 1) + c.num_hidden_layers * of_heads


def _biases(c: ModelConfig) -> int:
    """Of one layer's projections."""
    d, out = c.head_dim, c.attention_bias if c.attention_out_bias is None else c.attention_out_bias
    attention = d * (c.num_attention_heads + 2 * c.num_key_value_heads) if c.attention_bias else 0
    feed_forward = (2 if c.mlp_gated else 1) * c.intermediate_size + c.hidden_size if c.mlp_bias else 0
    return attention + (c.hidden_size if out else 0) + feed_forward


def forward_flops(c: ModelConfig, attended_keys: float) -> dict[str, float]:
    """Floating-point operations of the forward pass for one token, by part, 2 for each multiply-add.

    attended_keys: keys that the token's rows of scores have, summed over the layers (see `attended_keys`). Products alone are
    counted; norms, activations and the softmax are some tenths of a percent of them.
    """
    found = count_parameters(c)
    rows = 2 * c.num_attention_heads * c.head_dim * attended_keys
    return {
        "projections": 2 * (found["query"] + found["key"] + found["value"]),
        "scores": rows,
        "scores_values": rows,
        "output": 2 * found["output"],
        "feed_forward": 2 * found["feed_forward"],
        "head": 2 * c.hidden_size * c.vocab_size,
    }


def attended_keys(c: ModelConfig, context_length: float) -> float:
    """Keys that one token attends to with `context_length` before and at it, summed over the layers: no more than the window
    in those that have one."""
    windows = (c.window(layer) for layer in range(c.num_hidden_layers))
    return sum(context_length if window is None else min(context_length, window) for window in windows)


def mean_attended_keys(c: ModelConfig, length: int) -> float:
    """Keys that the tokens of a text of `length` attend to, its mean over them, summed over the layers: row i of a
    causal mask sees i keys, and no more than the window."""

    def mean(window: int | None) -> float:
        reach = length if window is None else min(window, length)
        return (reach * (reach + 1) / 2 + (length - reach) * reach) / length

    return sum(mean(c.window(layer)) for layer in range(c.num_hidden_layers))


def kv_cache_values(c: ModelConfig, context_length: int) -> int:
    """Keys and values in the cache of one text of `context_length` tokens, as a count of numbers: a layer with a window has
    room for no more tokens than that, its slack and its spare positions."""
    windows = (c.window(layer) for layer in range(c.num_hidden_layers))
    tokens = sum(
        context_length if w is None else min(context_length, w + window_slack(w) + window_spare(w)) for w in windows
    )
    return 2 * c.num_key_value_heads * c.head_dim * tokens


def window_slack(window: int) -> int:
    """Tokens that a cache holds behind a window, for an answer which is taken back without reading the text again: a
    quarter more, but not below 64 and not above 1,024."""
    return max(64, min(1024, window // 4))


def window_spare(window: int) -> int:
    """Positions beside them, so that the tokens rarely move to the front of the buffers."""
    return max(64, window // 8)
