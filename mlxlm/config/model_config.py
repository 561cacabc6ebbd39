"""`ModelConfig`: the configuration of a decoder, in Hugging Face's names, validated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from mlxlm.config.components import (
    CHOICES,
    CHUNKED,
    DENSE,
    FULL,
    NO_MLP,
    NORM_PLACEMENTS,
    NORMS,
    POSITIONS,
    RECURRENT,
    SHARED_NORM,
    SLIDING,
    SPARSE,
    NormPlacement,
)
from mlxlm.config.counts import attended_keys, count_parameters, forward_flops, kv_cache_values, sublayers
from mlxlm.config.experts import EXPERT_FIELDS, validate_experts, validate_mlp_layer_types
from mlxlm.config.numbers import MAX_SIZE, is_count, is_int, is_positive
from mlxlm.config.quantization import validate_quantization
from mlxlm.config.rope_scaling import validate_scaling
from mlxlm.config.sublayers import (
    LATENT_FIELDS,
    MIXERS,
    MLPS,
    Sublayer,
    experts,
    per_layer_input,
    validate_latent_attention,
    validate_layer_types,
    validate_shared_kv,
)
from mlxlm.utils.errors import ConfigError, short_repr


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. The defaults are Llama's.

    Names and meanings are those of Hugging Face's `LlamaConfig`, or of the architecture that introduced a field.
    The values of `norm`, `norm_placement` and `positions` are listed in `mlxlm.config.components`.

    Attributes:
        num_key_value_heads: Equal to `num_attention_heads` (the default) for multi-head attention, 1 for multi-query
            attention, between them for grouped-query attention.
        head_dim: Default: `hidden_size / num_attention_heads`. With latent attention, the sum of `qk_nope_head_dim` and
            `qk_rope_head_dim`.
        global_head_dim: `head_dim` of layers without a sliding window (Gemma 4). None: as in all layers.
        num_global_key_value_heads: `num_key_value_heads` of layers without a sliding window. None: as in all layers.
        attention_k_eq_v: Layers without a sliding window have no value projection: the values are the projected keys,
            before the norm and rotary positions of keys (Gemma 4).
        value_norm: Each head of the values has an RMSNorm without weights (Gemma 4).
        num_kv_shared_layers: The last layers, this many, have no key and value projections and no cache: they read the
            keys and values of the last layer before them that has the same entry in `layer_types` (Gemma 4).
        kv_lora_rank: Size of the latent vector of multi-head latent attention (DeepSeek V2); None: other attention.
        q_lora_rank: The same of queries; None: they are projected at once.
        qk_nope_head_dim: Dimensions of its queries and keys without rotary positions.
        qk_rope_head_dim: Dimensions with them; all heads have the same keys there.
        v_head_dim: Dimensions of its values.
        rms_norm_eps: Epsilon of any norm.
        attention_bias: Biases of the query, key and value projections.
        attention_out_bias: Bias of the output projection. None: as `attention_bias`.
        hidden_act: Activation, of the gate if `mlp_gated`.
        norm: "rms", "layer", or LayerNorm without some parameters: "layer_no_bias" (Cohere), "layer_no_weight" (OLMo).
        norm_unit_offset: The norm weight is stored minus 1 (Gemma), also that of `qk_norm`.
        norm_placement: "pre", "post", "output" or "both".
        parallel_residual: Attention and feed-forward read the same stream.
        shared_norm: They also share one norm (Falcon 7B).
        positions: "rope", "learned", "sinusoidal" (a table of fixed values, with which embeddings need a multiplier:
            Vaswani et al. 2017), "alibi" or "none".
        position_offset: Rows at the start of a position table that stand for no position (OPT has 2).
        rope_scaling: Hugging Face's object with `rope_type`; see `mlxlm.config.rope_scaling`.
        partial_rotary_factor: Fraction of a head that is rotated.
        sliding_window: Number of tokens that a token attends to, including itself.
        layer_types: "sliding_attention" for layers with the window, "chunked_attention" for those in which a token
            attends to its chunk of the text only (Llama 4), "full_attention" for others, "conv" for gated short
            convolutions instead of attention (LFM2), "linear_attention" for the gated delta rule (Qwen3-Next),
            "mamba" for Mamba 2 (Granite 4). None: all layers have the window, if there is one.
        attention_chunk_size: Number of tokens of a chunk.
        conv_L_cache: Taps of a short convolution.
        conv_dim: Its channels. None: hidden_size.
        conv_bias: Biases of short convolutions and their projections.
        linear_num_value_heads: Heads of the gated delta rule.
        linear_num_key_heads: Its number of query and key heads, each for as many value heads.
        linear_key_head_dim: Size of its queries and keys.
        linear_value_head_dim: Size of its values.
        linear_conv_kernel_dim: Taps of the convolution before it.
        mamba_n_heads: Heads of Mamba 2.
        mamba_n_groups: Number of groups of heads with the same B and C, and of parts of its output that are normalized.
        mamba_d_head: Size of a head.
        mamba_d_state: Size of a head's B and C; a head's state has `mamba_d_state` x `mamba_d_head` values.
        mamba_d_conv: Taps of the convolution before it.
        mamba_conv_bias: Bias of this convolution.
        mamba_proj_bias: Biases of its projections.
        time_step_limit: Least and greatest time step of Mamba 2. None: no limits.
        attn_output_gate: The output of attention is multiplied by a gate (Qwen3-Next).
        qk_norm: Norms of queries and keys: "head" (Qwen 3), "projection" (OLMo 2), "layer" (Phi), "layer_per_head"
            (StableLM, Command R+) or "l2" (Llama 4).
        clip_qkv: Queries, keys and values are clipped to this magnitude, before their positions (OLMo).
        alibi_scaled: ALiBi's biases are divided by sqrt(head_dim), like the scores (Falcon).
        attn_logit_softcapping: Soft cap of attention scores (Gemma 2).
        final_logit_softcapping: Soft cap of the output logits (Gemma 2).
        attention_sinks: Each head has a sink: one more score in the softmax, without a value (GPT-OSS).
        query_pre_attn_scalar: Scores are divided by its square root. None: by that of head_dim.
        attn_scale: Queries at position p of layers without rotary positions are multiplied by 1 + attn_scale · log(1 +
            floor((p + 1) / floor_scale)) (Llama 4). None: they aren't.
        floor_scale: See `attn_scale`.
        rope_layers: Whether each layer has rotary positions (SmolLM 3). None: all have them.
        rope_local_base_freq: Base of the rotary positions of layers with a sliding window, which then have no scaling
            (Gemma 3). None: as all layers.
        residual_multiplier: Factor on the output of each sublayer (Granite).
        logits_scaling: Divisor of the logits (Granite).
        num_experts: Number of experts of a mixture (Shazeer et al. 2017); None: feed-forwards are dense.
        num_experts_per_tok: How many of them a token goes to, those with the highest scores.
        moe_intermediate_size: Width of an expert.
        router: Scores of the experts: "softmax" of the router's outputs (Mixtral, Qwen), "sigmoid", where a bias of
            each expert is added for the choice (GLM 4.5), or "input_sigmoid", which multiplies the input of an expert
            instead of its output (Llama 4).
        router_bias: The router's projection has a bias (GPT-OSS).
        norm_topk_prob: The scores of a token's experts are divided by their sum.
        n_group: Number of groups of experts, of which the `topk_group` with the best ones are considered (DeepSeek V3).
        routed_scaling_factor: Factor on the output of the experts.
        shared_expert_intermediate_size: Width of an expert that all tokens go to as well; None: there is none.
        shared_expert_gate: The output of the shared expert is multiplied by a gate (Qwen 2).
        enable_moe_block: Layers have experts beside the dense feed-forward, whose outputs are added. Both have norms of
            their own, also the router, and each expert has a scale (Gemma 4).
        mlp_layer_types: "sparse" for layers with experts, "dense" for others, "none" for those without a feed-forward
            (Nemotron-H). None: all have experts, if there are any.
        mlp_gated: Feed-forward with a gate, else one up projection and the activation.
        swiglu_limit: Limit of the gate, and of `up` on both sides, in SwiGLU, which is then gate · sigmoid(swiglu_alpha
            · gate) · (up + 1) (GPT-OSS). None: plain SwiGLU.
        swiglu_alpha: See `swiglu_limit`.
        head_bias: The output matrix has a bias (Phi).
        embedding_multiplier: Factor on the embeddings.
        embedding_norm: Normalize the embeddings (BLOOM).
        hidden_size_per_layer_input: Size of a vector that each layer gets of each token, from a second embedding and a
            projection of the first one (Gemma 4). None: there are none.
        vocab_size_per_layer_input: Rows of the second embedding. None: vocab_size.
        use_double_wide_mlp: Feed-forwards of the layers of `num_kv_shared_layers` have twice the width (Gemma 4).
        layer_scalar: The output of each layer is multiplied by a learned number (Gemma 4).
        quantization: MLX's object, such as `{"bits": 4, "group_size": 64, "mode": "affine"}`, with an object or False
            (not quantized) under the name of a module that differs.

    Raises:
        ConfigError: Some values can't work; the message lists all problems.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # both are set in __post_init__
    head_dim: int = None  # type: ignore[assignment]
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    value_norm: bool = False
    num_kv_shared_layers: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    model_type: str = "llama"
    norm: str = "rms"
    norm_unit_offset: bool = False
    norm_placement: str = "pre"
    parallel_residual: bool = False
    shared_norm: bool = False
    positions: str = "rope"
    position_offset: int = 0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_chunk_size: int | None = None
    conv_L_cache: int = 3
    conv_dim: int | None = None
    conv_bias: bool = False
    linear_num_value_heads: int | None = None
    linear_num_key_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    mamba_n_heads: int | None = None
    mamba_n_groups: int = 1
    mamba_d_head: int | None = None
    mamba_d_state: int | None = None
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = None
    attn_output_gate: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    alibi_scaled: bool = False
    attention_out_bias: bool | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    query_pre_attn_scalar: float | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    attn_scale: float | None = None
    floor_scale: float | None = None
    rope_layers: tuple[bool, ...] | None = None
    rope_local_base_freq: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    router: str = "softmax"
    router_bias: bool = False
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    enable_moe_block: bool = False
    mlp_layer_types: tuple[str, ...] | None = None
    mlp_gated: bool = True
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int | None = None
    use_double_wide_mlp: bool = False
    layer_scalar: bool = False
    quantization: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        explicit_head_dim = self.head_dim is not None
        if not explicit_head_dim and is_count(self.hidden_size) and is_count(self.num_attention_heads):
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.kv_lora_rank is not None and is_count(self.qk_nope_head_dim) and is_count(self.qk_rope_head_dim):
            object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
            explicit_head_dim = True
        for name in ("layer_types", "rope_layers", "mlp_layer_types", "time_step_limit"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if problems := list(validate_config(self, explicit_head_dim)):
            raise ConfigError("this configuration can't work: " + "; ".join(problems))

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with other values, validated again."""
        return replace(self, **changes)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        eos = self.eos_token_id
        return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)

    @property
    def layer_norms(self) -> NormPlacement:
        """The norms of a layer."""
        return SHARED_NORM if self.shared_norm else NORM_PLACEMENTS[self.norm_placement]

    def layer_head_dim(self, layer: int) -> int:
        """Size of a head in this layer."""
        return self.global_head_dim if self.global_head_dim and self.window(layer) is None else self.head_dim

    def layer_kv_heads(self, layer: int) -> int:
        """Number of key and value heads in this layer."""
        heads = self.num_global_key_value_heads
        return heads if heads and self.window(layer) is None else self.num_key_value_heads

    def has_v_proj(self, layer: int) -> bool:
        """Whether attention of this layer has a value projection."""
        return not (self.shares_kv(layer) or (self.attention_k_eq_v and self.window(layer) is None))

    def shares_kv(self, layer: int) -> bool:
        """Whether this layer reads the keys and values of another one; see `kv_layers`."""
        return 0 < self.num_hidden_layers - layer <= self.num_kv_shared_layers

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the one whose keys and values it reads: another one if `shares_kv`, else itself."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        types = self.layer_types or (FULL,) * self.num_hidden_layers
        last = {kind: layer for layer, kind in enumerate(types[:first])}
        return (*range(first), *(last[kind] for kind in types[first:]))

    def rotary_dims(self, layer: int = 0) -> int:
        """Number of dimensions of a head that are rotated in this layer."""
        if self.positions != "rope":
            return 0
        return self.qk_rope_head_dim or int(self.layer_head_dim(layer) * self.partial_rotary_factor)

    @property
    def longrope_original_length(self) -> int | None:
        """With longrope, the text length beyond which the wavelengths of all positions change; else None."""
        scaling = self.rope_scaling or {}
        return scaling["original_max_position_embeddings"] if scaling.get("rope_type") == "longrope" else None

    def has_rope(self, layer: int) -> bool:
        """Whether this layer has rotary positions."""
        return self.positions == "rope" and (self.rope_layers is None or self.rope_layers[layer])

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token can attend to in this layer, including itself; None without a limit."""
        if self.chunk(layer) is not None:
            return self.chunk(layer)
        if self.layer_types is not None and self.layer_types[layer] != SLIDING:
            return None
        return self.sliding_window

    def chunk(self, layer: int) -> int | None:
        """Number of tokens of the chunks that attention of this layer has; None without chunks."""
        has_chunks = self.layer_types is not None and self.layer_types[layer] == CHUNKED
        return self.attention_chunk_size if has_chunks else None

    def mixer(self, layer: int) -> str:
        """The sublayer that mixes tokens in this layer, a name in `mlxlm.config.sublayers.MIXERS`."""
        if self.kv_lora_rank is not None:
            return "latent_attention"
        return "attention" if self.layer_types is None else RECURRENT.get(self.layer_types[layer], "attention")

    def mlp(self, layer: int) -> str:
        """The feed-forward of this layer, a name in `mlxlm.config.sublayers.MLPS`."""
        kind = SPARSE if self.mlp_layer_types is None else self.mlp_layer_types[layer]
        if kind == NO_MLP:
            return "none"
        return "mlp" if self.num_experts is None or kind == DENSE or self.enable_moe_block else "experts"

    def mlp_width(self, layer: int) -> int:
        """Width of the dense feed-forward of this layer."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.shares_kv(layer) else 1)

    def has_mlp(self, layer: int) -> bool:
        """Whether this layer has a feed-forward."""
        return self.mlp(layer) != "none"

    @cached_property
    def layer_sublayers(self) -> list[tuple[Sublayer, ...]]:
        """The mixer, the feed-forward and further sublayers of each layer; layers of one kind share them."""
        layers = range(self.num_hidden_layers)
        kinds = [(self.mixer(i), self.mlp(i), self.window(i) is None, self.shares_kv(i)) for i in layers]
        others = [experts] * self.enable_moe_block + [per_layer_input] * bool(self.hidden_size_per_layer_input)
        made = {
            kind: tuple(sublayer(self, i) for sublayer in (MIXERS[kind[0]], MLPS[kind[1]], *others))
            for kind, i in zip(kinds, layers, strict=True)
        }
        return [made[kind] for kind in kinds]

    @property
    def per_layer_width(self) -> int:
        """Size of the inputs of all layers together, see `hidden_size_per_layer_input`. 0 without."""
        return self.num_hidden_layers * (self.hidden_size_per_layer_input or 0)

    def parameter_count(self) -> int:
        """Number of parameters; tied embedding and head count once."""
        return sum(count_parameters(self).values())

    def active_parameter_count(self) -> int:
        """Number of parameters that are used for a token: without the experts that it doesn't go to."""
        unused = sum(
            layers * (matrix.parameters - matrix.active_parameters)
            for sublayer, layers in sublayers(self)
            for matrix in sublayer.matrices
        )
        return self.parameter_count() - unused

    def flops_per_token(self, context_length: int, training: bool = False) -> int:
        """Floating-point operations for one token that attends to `context_length` keys, 2 per multiply-add.

        Forward: 2 per matrix parameter, and 4·H·D·context per layer for the scores and the weighted sum of values,
        where a sliding window limits the context. Training: 3 times that, since the backward pass is twice the
        forward pass (Kaplan et al. 2020, section 2.1). With a causal mask, the mean context is half the sequence.
        """
        forward = int(sum(forward_flops(self, attended_keys(self, context_length)).values()))
        return 3 * forward if training else forward

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that a token adds to the key-value cache over all layers, until windows are full."""
        return sum(kv_cache_values(self, 1)) * bytes_per_value


MAX_LAYERS = 10_000  # far more than any decoder has, and few enough for a list of names
_MAX_TOKEN_ID = 1 << 24  # a larger id means that the file is damaged
_MAX_PARAMETERS = 10**13
_FROM_ZERO = ("position_offset", "num_kv_shared_layers")  # whole numbers that can be 0

# By a field's declared type: the test of a value, and what an error message says that it must be.
_BY_TYPE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "bool | None": (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    "float": (is_positive, "a positive number"),
    "float | None": (lambda value: value is None or is_positive(value), "a positive number or null"),
}


def validate_config(c: ModelConfig, explicit_head_dim: bool) -> Iterator[str]:
    """Yield a message for each problem of a configuration.

    Args:
        c: The configuration, whose other methods may fail.
        explicit_head_dim: Whether `head_dim` was given, so that `hidden_size` needn't be a multiple of the heads.
    """
    counts = [field.name for field in fields(c) if field.type == "int" and field.name not in _FROM_ZERO]
    bad_counts = [name for name in counts if not is_count(getattr(c, name))]
    for name in bad_counts:
        yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive whole number"
    field_errors = list(_validate_fields(c))
    yield from field_errors
    if not bad_counts:
        yield from _validate_sizes(c, explicit_head_dim)
        if not field_errors:
            combination_errors = list(_validate_combinations(c))
            yield from combination_errors
            if not combination_errors and c.num_hidden_layers <= MAX_LAYERS and c.parameter_count() > _MAX_PARAMETERS:
                yield f"it has {c.parameter_count():.3g} parameters, check hidden_size and num_hidden_layers"
    if c.quantization is not None:
        yield from validate_quantization(c.quantization)
    yield from _validate_token_ids(c)


def is_unused_id(id: Any, vocab_size: Any) -> bool:
    """Whether a token id lies beyond the vocabulary, but not so far that the file must be damaged."""
    return type(id) is int and is_count(vocab_size) and vocab_size <= id < _MAX_TOKEN_ID


def _validate_fields(c: ModelConfig) -> Iterator[str]:
    """Problems of single fields."""
    for field in fields(c):
        value = getattr(c, field.name)
        is_valid, expected = _BY_TYPE.get(str(field.type), (lambda value: True, ""))
        if not is_valid(value):
            yield f"{field.name} is {short_repr(value)}, it must be {expected}"
    if not isinstance(c.model_type, str):
        yield f"model_type is {short_repr(c.model_type)}, it must be a string (llama)"
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            yield f"{name} is {short_repr(getattr(c, name))}, it must be one of {', '.join(map(str, choices))}"
    if is_positive(c.partial_rotary_factor) and c.partial_rotary_factor > 1:
        yield f"partial_rotary_factor is {short_repr(c.partial_rotary_factor)}, it must be at most 1"
    for name in _FROM_ZERO:
        if not is_count(value := getattr(c, name)) and value != 0:
            yield f"{name} is {short_repr(value)}, it must be a whole number (0)"
    match c.time_step_limit:
        case None:
            pass
        case (low, high) if is_positive(high) and (low == 0 or is_positive(low)) and low <= high:
            pass
        case limit:
            yield f"time_step_limit is {short_repr(limit)}, it must be two numbers, the least and the greatest, or null"
    for name in (
        "sliding_window", "global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
    ):  # fmt: skip
        if (value := getattr(c, name)) is not None and not is_count(value):
            yield f"{name} is {short_repr(value)}, it must be a positive whole number or null"


def _validate_sizes(c: ModelConfig, explicit_head_dim: bool) -> Iterator[str]:
    heads = c.num_attention_heads
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if is_count(kv_heads := getattr(c, name)) and heads % kv_heads:
            divisors = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
            yield f"{name} {kv_heads} does not divide num_attention_heads {heads} (one of {divisors} does)"
    if c.hidden_size % heads and not explicit_head_dim:
        multiple = heads * -(-c.hidden_size // heads)
        yield (
            f"hidden_size {c.hidden_size} is not a multiple of num_attention_heads {heads} ({multiple} is), "
            "and head_dim is null"
        )
    if c.num_hidden_layers > MAX_LAYERS:
        yield f"num_hidden_layers is {c.num_hidden_layers}, at most {MAX_LAYERS} are possible"


def _validate_combinations(c: ModelConfig) -> Iterator[str]:
    """Problems of fields that are valid on their own."""
    if c.kv_lora_rank is not None:
        if problems := list(validate_latent_attention(c)):
            yield from problems
            return
    elif set_fields := [name for name in LATENT_FIELDS if getattr(c, name) is not None]:
        yield f"{', '.join(set_fields)} need latent attention, but kv_lora_rank is null (512)"
        return
    if c.positions == "rope":
        yield from _validate_rope(c)
    rows = c.max_position_embeddings + c.position_offset
    if POSITIONS[c.positions].table and rows > MAX_SIZE:
        yield f"max_position_embeddings makes a table of {rows} rows, at most {MAX_SIZE} are possible"
    if c.parallel_residual and NORM_PLACEMENTS[c.norm_placement].attention_output:
        yield f"parallel_residual needs norm_placement pre, not {c.norm_placement}"
    if c.shared_norm and not c.parallel_residual:
        yield "shared_norm is true, but sublayers share a norm only if parallel_residual is true"
    if c.norm_unit_offset and not NORMS[c.norm].unit_offset:
        yield f"norm_unit_offset is true, but the norm {c.norm} has no such offset (rms has)"
    if c.head_bias and c.tie_word_embeddings:
        yield "head_bias is true, but the head is the embedding (tie_word_embeddings=false)"
    if c.swiglu_limit is not None and not (c.mlp_gated and c.hidden_act == "silu"):
        yield "swiglu_limit is for SwiGLU (mlp_gated=true, hidden_act=silu)"
    if (c.attn_scale is None) != (c.floor_scale is None):
        yield f"attn_scale is {c.attn_scale} and floor_scale {c.floor_scale}, both or none must be set (0.1 and 8192)"
    type_errors = [] if c.layer_types is None else list(validate_layer_types(c))
    yield from type_errors
    if (c.attention_k_eq_v or c.num_kv_shared_layers) and c.qk_norm not in (None, "head"):
        yield f"qk_norm is {c.qk_norm}, attention_k_eq_v and num_kv_shared_layers need head or null"
    if c.num_kv_shared_layers and not type_errors:
        yield from validate_shared_kv(c)
    if c.rope_local_base_freq is not None and c.sliding_window is None:
        yield "rope_local_base_freq is for layers with a sliding window, but sliding_window is null"
    if c.mlp_layer_types is not None:
        yield from validate_mlp_layer_types(c)
    if c.num_experts is not None:
        yield from validate_experts(c)
    elif set_fields := [name for name in EXPERT_FIELDS if getattr(c, name) != getattr(ModelConfig, name)]:
        yield f"{', '.join(set_fields)} need a number of experts, but num_experts is null (8)"


def _validate_rope(c: ModelConfig) -> Iterator[str]:
    """Yield a message for each problem of the rotary position fields of a configuration."""
    problems: list[str] = []
    for name in ("head_dim", "global_head_dim"):
        if (size := getattr(c, name)) is None:
            continue
        dims = c.qk_rope_head_dim or int(size * c.partial_rotary_factor)
        if dims % 2 and c.partial_rotary_factor == 1:
            yield f"{name} {dims} is odd, rotary positions need an even one ({dims + 1})"
        elif dims % 2 or dims == 0:
            product = f"partial_rotary_factor {c.partial_rotary_factor} of {name} {size}"
            yield f"{product} is {dims} dimensions, rotary positions need an even number of them (1.0)"
        if c.rope_scaling is not None:
            problems += validate_scaling(c.rope_scaling, dims, c.rope_theta)
    yield from dict.fromkeys(problems)
    layers = c.rope_layers
    if layers is not None and not (isinstance(layers, tuple) and all(isinstance(has, bool) for has in layers)):
        yield "rope_layers must be a list of true and false"
    elif layers is not None and len(layers) != c.num_hidden_layers:
        yield f"rope_layers has {len(layers)} entries, one for each of {c.num_hidden_layers} layers is needed"


def _validate_token_ids(c: ModelConfig) -> Iterator[str]:
    """Problems of BOS, EOS and padding ids.

    Old files have -1 for a missing token, and fine-tuned models may have padding beyond their vocabulary.
    """
    size = c.vocab_size if is_count(c.vocab_size) else MAX_SIZE
    eos_ids = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
    if any(not (id is None or (is_int(id) and 0 <= id < size)) for id in eos_ids):
        yield f"eos_token_id is {short_repr(c.eos_token_id)}, it must be a token id below {size} or a list of them"
    for name, limit in (("bos_token_id", size), ("pad_token_id", MAX_SIZE)):
        value = getattr(c, name)
        if value is not None and not (is_int(value) and -1 <= value < limit):
            yield f"{name} is {short_repr(value)}, it must be a token id below {limit} or null"
