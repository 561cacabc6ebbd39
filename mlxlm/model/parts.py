"""The sublayers of a Llama-style decoder. Parameter names are Hugging Face's."""

from __future__ import annotations

from mlxlm._mlx import ON_CPU, mx, nn
from mlxlm.config import ModelConfig
from mlxlm.kernels import add_rms_norm, attention, rms_norm, swiglu


class Embedding(nn.Embedding):
    """A table of token vectors whose gradient is the same to the bit every time.

    On a GPU, MLX adds the gradients of equal tokens with atomics, in whatever order they arrive.
    """

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens int `[B, T]` -> `[B, T, hidden]`"""
        return super().__call__(tokens) if ON_CPU else lookup(self.weight, tokens)


@mx.custom_function
def lookup(table: mx.array, tokens: mx.array) -> mx.array:
    """Rows of `table` `[V, hidden]`; its gradient is a product with one-hot rows, 512 tokens at a time."""
    return table[tokens]


@lookup.vjp
def _lookup_vjp(primals, cotangent, _output):
    table, tokens = primals
    flat, rows = tokens.flatten(), cotangent.reshape(-1, table.shape[1])
    total = mx.zeros_like(table)
    for start in range(0, flat.size, 512):
        hot = flat[start : start + 512, None] == mx.arange(table.shape[0])
        total = total + hot.astype(table.dtype).T @ rows[start : start + 512]
    return total, mx.zeros_like(tokens)


class StreamNorm(nn.RMSNorm):
    """RMSNorm of the residual stream, which takes up the output of the sublayer before on the way."""

    def __call__(self, stream: mx.array, update: mx.array | None) -> tuple[mx.array, mx.array]:
        """`[B, T, hidden]` -> stream + update and the norm of that; `update` is None at the start of the stream."""
        if update is None:
            return stream, rms_norm(stream, self.weight, self.eps)
        return add_rms_norm(update, stream, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions (Ainslie et al. 2023; Su et al. 2021)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        h, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        self.scale = d**-0.5
        self.q_proj = nn.Linear(h, self.heads * d, bias=bias)
        self.k_proj = nn.Linear(h, self.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(h, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(self.heads * d, h, bias=bias)
        self.rope = nn.RoPE(d, traditional=False, base=config.rope_theta)

    def __call__(self, x: mx.array, cache=None) -> mx.array:
        """x `[B, T, hidden]` -> `[B, T, hidden]`; the cache, if any, is advanced by T positions."""
        B, T, _ = x.shape

        def split(y: mx.array, heads: int) -> mx.array:
            return y.reshape(B, T, heads, self.head_dim).swapaxes(1, 2)

        queries = split(self.q_proj(x), self.heads)
        keys = split(self.k_proj(x), self.kv_heads)
        values = split(self.v_proj(x), self.kv_heads)
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = attention(queries, keys, values, self.scale, training=self.training)
        return self.o_proj(out.swapaxes(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        h, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(h, inner, bias=bias)
        self.up_proj = nn.Linear(h, inner, bias=bias)
        self.down_proj = nn.Linear(inner, h, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normalised stream and added back (pre-norm).

    An addition waits for the norm that follows it, so that one pass over memory does both.
    """

    def __init__(self, config: ModelConfig, dropout: float):
        super().__init__()
        self.input_layernorm = StreamNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = StreamNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, stream: mx.array, update: mx.array | None, cache=None) -> tuple[mx.array, mx.array]:
        """The stream and what the layer before adds to it -> the stream and what this one adds to it."""
        stream, x = self.input_layernorm(stream, update)
        update = self.dropout(self.self_attn(x, cache))
        stream, x = self.post_attention_layernorm(stream, update)
        return stream, self.dropout(self.mlp(x))
