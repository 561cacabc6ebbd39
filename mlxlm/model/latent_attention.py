"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

Keys and values of all heads are products of one latent vector per token, which the cache has instead of them. A
decoding step multiplies the queries and the outputs by those matrices instead: it attends to the latent vectors
themselves, like multi-query attention with one wide head. Many tokens at once are cheaper with keys and values.
"""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import latent_attention_factor
from mlxlm.kernels import QuantizedKV, attention, latent_attention
from mlxlm.kernels.mask import causal_mask, relative_positions
from mlxlm.model.linear import FusedProjections, Linear, QuantizedMatrices
from mlxlm.model.norms import RMSNorm
from mlxlm.model.positions import RotaryEmbedding

_NORM_EPS = 1e-6  # of the latent vectors, whatever rms_norm_eps is: transformers
_MAX_LATENT_QUERIES = 256  # whose scores `latent_attention` has in memory


class HeadLinear(nn.Module):
    """A linear projection for each head, with the weights `[H, output, input]` of mlx_lm's `MultiLinear`."""

    def __init__(self, heads: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = mx.zeros((heads, outputs, inputs))

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Project.

        Args:
            x: `[B, H, T, input]`, or `[B, 1, T, input]` for all heads.
            transpose: As the argument of `mx.quantized_matmul`: False swaps input and output.

        Returns:
            `[B, H, T, output]`.
        """
        weight = self.weight.swapaxes(1, 2) if transpose else self.weight
        B, heads, T, size = x.shape
        if heads == len(weight):
            return x @ weight
        # One product, whose gradients aren't sums over heads.
        out = x.reshape(B, T, size) @ weight.swapaxes(0, 1).reshape(size, -1)
        return out.reshape(B, T, len(weight), -1).swapaxes(1, 2)

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine", **_options: Any) -> QuantizedHeadLinear:
        """Quantize the weights of all heads."""
        return QuantizedHeadLinear(self, group_size, bits, mode)


class QuantizedHeadLinear(QuantizedMatrices):
    """`HeadLinear` with quantized weights."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Project; see `HeadLinear`."""
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.get("biases"), transpose=transpose, group_size=self.group_size,
            bits=self.bits, mode=self.mode,
        )  # fmt: skip


class LatentAttention(FusedProjections):
    """Multi-head latent attention, with Hugging Face's names.

    Its `kv_b_proj` is two modules, as in mlx_lm: `embed_q` maps a head's queries to the latent space, and `unembed_out`
    maps latent vectors to a head's values.

    Args:
        config: The model's configuration.
        layer: Index of the layer; all are alike.
    """

    window = None  # of the layer, as in `Attention`

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        rank: int = config.kv_lora_rank  # type: ignore[assignment]  # the fields are validated
        nope: int = config.qk_nope_head_dim  # type: ignore[assignment]
        rotary: int = config.qk_rope_head_dim  # type: ignore[assignment]
        values: int = config.v_head_dim  # type: ignore[assignment]
        self.heads, self.rank, self.nope_dim, self.value_dim = heads, rank, nope, values
        self.scale = config.head_dim**-0.5 * latent_attention_factor(config.rope_scaling or {"rope_type": "default"})
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * config.head_dim, bias=False)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, rank + rotary, bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, _NORM_EPS)
        self.embed_q = HeadLinear(heads, nope, rank)
        self.unembed_out = HeadLinear(heads, rank, values)
        self.o_proj = Linear(heads * values, hidden, bias=bias)
        self.rope = RotaryEmbedding(config, layer)

    def _projections(self) -> dict[str, list[nn.Module]]:
        first = self.q_a_proj if "q_a_proj" in self else self.q_proj
        queries = {"queries": [self.q_b_proj]} if "q_b_proj" in self else {}
        return {"inputs": [first, self.kv_a_proj_with_mqa], **queries, "output": [self.o_proj]}

    def can_decode(self, dtype: mx.Dtype, forms: list[tuple[int, int] | None]) -> bool:
        """Whether `decode` supports a cache; see `Attention.can_decode`."""
        return not self.rope.varies

    def decode(self, x: mx.array, cache: Any) -> mx.array:
        """Apply attention to one position per row, after `fuse`; see `Attention.decode`."""
        projected = self._fused.inputs(x)
        compressed = self.rank + self.rope.dims
        queries, latents = mx.split(projected, [projected.shape[1] - compressed], axis=-1)
        if "q_b_proj" in self:
            queries = self._fused.queries(self.q_a_layernorm(queries))
        queries, rotated, keys, latents = self.split_and_rotate(queries[:, None], latents[:, None], cache)
        keys, latents = cache.update_and_fetch(keys, latents)
        out = self._attend_to_latents(queries, rotated, keys, latents, cache.mask(None))
        return self._fused.output(out.reshape(x.shape[0], -1))

    def split_and_rotate(
        self, queries: mx.array, compressed: mx.array, cache: Any
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return both parts of the queries, times the scale of attention, rotated keys, and normalized latent vectors.

        Args:
            queries: `[B, T, H · (nope + rope)]`.
            compressed: `[B, T, rank + rope]`.
            cache: What has the position of the first token.

        Returns:
            Queries `[B, H, T, nope]` and `[B, H, T, rope]`, keys `[B, 1, T, rope]` and latents `[B, 1, T, rank]`.
        """
        B, T, _ = queries.shape
        queries = (queries * self.scale).reshape(B, T, self.heads, -1).swapaxes(1, 2)
        queries, rotated = mx.split(queries, [self.nope_dim], axis=-1)
        latents, keys = mx.split(compressed[:, None], [self.rank], axis=-1)
        rotated, keys = self.rope(rotated, keys, 0 if cache is None else cache.offset, cache)
        return queries, rotated, keys, self.kv_a_layernorm(latents)

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Apply attention; see `Attention`."""
        if x.ndim == 2:
            return self.decode(x, cache)
        B, T, _ = x.shape
        projected = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if "q_a_proj" in self else self.q_proj(x)
        queries, rotated, keys, latents = self.split_and_rotate(projected, self.kv_a_proj_with_mqa(x), cache)
        first = None
        if cache is not None:
            keys, latents = cache.update_and_fetch(keys, latents)
            first = getattr(cache, "first", None)  # mlx_lm's caches don't have it
        S = keys.shape[2]
        if cache is not None and self._latents_are_cheaper(T, S):
            mask = causal_mask(relative_positions(T, S), None, first)
            out = self._attend_to_latents(queries, rotated, keys, latents, mask)
        else:
            keys, latents = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, latents))
            keys = mx.broadcast_to(keys, (B, self.heads, S, self.rope.dims))
            keys = mx.concatenate([self.embed_q(latents, transpose=False), keys], axis=-1)
            queries = mx.concatenate([queries, rotated], axis=-1)
            values = self.unembed_out(latents)
            out = attention(queries, keys, values, 1.0, first=first, segment_ids=segment_ids, training=self.training)
        return self.o_proj(out.swapaxes(1, 2).reshape(B, T, -1))

    def _latents_are_cheaper(self, T: int, S: int) -> bool:
        """Whether attention of T queries to S latent vectors has fewer multiplications than with keys and values.

        For DeepSeek V3, up to 170 queries of a long text: a key and a value of a head take 131,072 multiplications, a
        score and its share of the output 320, or 1,088 with latent vectors.
        """
        expansion = self.rank * (self.nope_dim + self.value_dim)  # of a query and its output, or of a key and its value
        latent = T * expansion + T * S * (2 * self.rank + self.rope.dims)
        expanded = S * expansion + T * S * (self.nope_dim + self.rope.dims + self.value_dim)
        return T <= _MAX_LATENT_QUERIES and latent < expanded

    def _attend_to_latents(self, queries: mx.array, rotated: mx.array, keys: Any, latents: Any, mask: mx.array) -> Any:
        """Attention to latent vectors with a mask: `[B, H, T, value_dim]`."""
        return self.unembed_out(latent_attention(self.embed_q(queries), rotated, latents, keys, mask))
