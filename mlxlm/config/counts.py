"""Parameters, FLOPs, activations and cache sizes of a decoder, from the sublayers of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from mlxlm.config.components import NORMS, POSITIONS
from mlxlm.config.sublayers import Sublayer

Config = Any  # a ModelConfig, whose module imports this one


def sublayers(c: Config) -> Iterable[tuple[Sublayer, int]]:
    """Each kind of sublayer, and how many layers have it."""
    return Counter(chain.from_iterable(c.layer_sublayers)).items()


def count_parameters(c: Config) -> dict[str, int]:
    """Number of parameters by group, over all layers. A tied head is 0, so that nothing is counted twice."""
    hidden, placement = c.hidden_size, c.layer_norms
    positions = c.max_position_embeddings + c.position_offset if POSITIONS[c.positions].trainable else 0
    norms = sum(len(placement.names(c.has_mlp(layer))) for layer in range(c.num_hidden_layers))
    norms += (not placement.after_addition) + c.embedding_norm
    counts = Counter({"embedding": c.vocab_size * hidden, "positions": positions * hidden})
    counts.update(norms=norms * hidden * NORMS[c.norm].vectors, biases=c.vocab_size * c.head_bias)
    for sublayer, layers in sublayers(c):
        counts["norms"] += layers * sublayer.norms
        counts["biases"] += layers * sublayer.biases
        for matrix in sublayer.matrices:
            counts[matrix.group] += layers * matrix.parameters
            counts["biases"] += layers * matrix.experts * matrix.outputs * matrix.bias
    counts["biases"] += c.num_hidden_layers * c.layer_scalar
    if c.hidden_size_per_layer_input:
        counts["per_layer_embedding"] = (c.vocab_size_per_layer_input or c.vocab_size) * c.per_layer_width
        counts["per_layer_projection"] = hidden * c.per_layer_width
        counts["norms"] += c.hidden_size_per_layer_input * NORMS[c.norm].vectors
    counts["head"] = 0 if c.tie_word_embeddings else c.vocab_size * hidden
    return dict(counts)


def matrix_parameters(c: Config) -> int:
    """Number of parameters in the matrices of all layers."""
    return sum(layers * m.parameters for sublayer, layers in sublayers(c) for m in sublayer.matrices)


def forward_flops(c: Config, keys: Sequence[float]) -> dict[str, float]:
    """Floating-point operations of the forward pass for one token, 2 per multiply-add.

    Only matrix products are counted; norms, activations and the softmax are a few tenths of a percent of them.

    Args:
        c: The configuration.
        keys: Number of keys that the token attends to in each layer (see `attended_keys`).
    """
    flops = Counter[str]()
    for sublayer, layers in sublayers(c):
        for matrix in sublayer.matrices:
            part = "projections" if matrix.group in ("query", "key", "value") else matrix.group
            flops[part] += 2 * layers * matrix.active_parameters
        if sublayer.state_flops:
            flops["state"] += layers * sublayer.state_flops
    mixers = [mixer.score_flops for mixer, *_ in c.layer_sublayers]
    scores, values = (sum(n[side] * count for n, count in zip(mixers, keys, strict=True)) for side in (0, 1))
    head, projection = 2 * c.hidden_size * c.vocab_size, 2 * c.hidden_size * c.per_layer_width
    per_layer = {"per_layer_projection": projection} if projection else {}
    return {**flops, **per_layer, "scores": scores, "scores_values": values, "head": head}


def attended_keys(c: Config, context_length: float) -> list[float]:
    """Number of keys that the last of `context_length` tokens attends to in each layer, limited by its window."""
    return _of_attention(c, lambda window: min(context_length, window or context_length))


def mean_attended_keys(c: Config, length: int) -> list[float]:
    """Mean of `attended_keys` over the tokens of a text: row i of a causal mask has i keys, or the window's."""

    def mean(window: int | None) -> float:
        limit = min(window or length, length)
        return (limit * (limit + 1) / 2 + (length - limit) * limit) / length

    return _of_attention(c, mean)


def _of_attention(c: Config, count: Callable[[int | None], float]) -> list[float]:
    """The result of `count` for the window of each layer; 0 for layers without attention."""
    has_attention = (any(mixer.score_flops) for mixer, *_ in c.layer_sublayers)
    return [count(c.window(layer)) if has else 0 for layer, has in enumerate(has_attention)]


def layer_activations(c: Config) -> int:
    """Number of values per token that the operations of the largest layer produce.

    The residual before either sublayer and its norms, and those of the sublayers.
    """
    largest = max(sum(sublayer.activations for sublayer in kind) for kind in set(c.layer_sublayers))
    return (2 + len(c.layer_norms.names())) * c.hidden_size + largest


def kv_cache_values(c: Config, context_length: int) -> tuple[int, int]:
    """Number of elements of the keys and of the values in the cache of one sequence.

    A layer with a window stores at most the window, its slack and its spare positions.
    """
    keys = values = 0
    for layer, (mixer, *_) in enumerate(c.layer_sublayers):
        window = c.window(layer)
        limit = context_length if window is None else window + window_slack(window) + window_spare(window)
        vectors = mixer.kv_heads * min(context_length, limit)
        keys, values = keys + vectors * mixer.kv_dims[0], values + vectors * mixer.kv_dims[1]
    return keys, values


def recurrent_state_bytes(c: Config, bytes_per_value: int) -> int:
    """Bytes of the states of the recurrent layers of one sequence, however long it is."""
    mixers = [mixer for mixer, *_ in c.layer_sublayers]
    return sum(mixer.state_values * bytes_per_value + 4 * mixer.float32_state_values for mixer in mixers)


def window_slack(window: int) -> int:
    """Tokens that a cache keeps beyond a window, so that an answer can be trimmed without a new prefill.

    A quarter of the window, between 64 and 1,024.
    """
    return max(64, min(1024, window // 4))


def window_spare(window: int) -> int:
    """Further positions in the cache, so that its tokens are rarely moved to the front of the buffers."""
    return max(64, window // 8)


def attention_windows(c: Config) -> list[int | None]:
    """The window of each layer with attention."""
    return [c.window(layer) for layer, (mixer, *_) in enumerate(c.layer_sublayers) if any(mixer.score_flops)]
