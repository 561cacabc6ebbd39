"""Describe a checkpoint from its headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxlm.backend.mlx import ON_CPU
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint, MlxLmCheckpoint
from mlxlm.checkpoint.load import weights_memory
from mlxlm.checkpoint.mlx_lm import build_with_mlx_lm
from mlxlm.config import ModelConfig
from mlxlm.config.components import NORMS, QK_NORMS
from mlxlm.config.counts import attention_windows
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.families import compatibility_warning, get_quantization_config
from mlxlm.utils.errors import CheckpointError, TokenizerError
from mlxlm.utils.formatting import human_count


@dataclass(frozen=True)
class TokenizerInfo:
    """Facts about a tokenizer; `chat_template` tells whether it has one."""

    tokenizer_type: str
    vocab_size: int
    special_tokens: dict[str, int]
    bos_token: str | None
    eos_token: str | None
    chat_template: bool


@dataclass(frozen=True)
class Description:
    """Facts about a checkpoint.

    Attributes:
        path: Its path.
        format: Its format.
        family: Its `model_type`.
        runtime: What runs it: mlxlm's decoder or mlx_lm.
        problem: Why mlx_lm can't run it; None if nothing is known.
        architecture: Heading -> one phrase.
        tensors: Number of tensors.
        parameters: Number of parameters.
        bytes: Bytes of all tensors.
        bits_per_weight: Average over all parameters.
        types: The file's name of a type -> number of tensors and bytes.
        quantization: The default quantization, or None.
        layer_overrides: Layer -> another quantization, or False for a layer that isn't quantized.
        memory: Bytes of the weights in memory on this machine.
        cache_per_token: Bytes of the key-value cache per token; None for a model of mlx_lm.
        tokenizer: None if mlxlm can't read one, see `warnings`.
        warnings: Oddities that do no harm.
    """

    path: str
    format: str
    family: str
    runtime: str
    problem: str | None
    architecture: dict[str, str]
    tensors: int
    parameters: int
    bytes: int
    bits_per_weight: float
    types: dict[str, tuple[int, int]]
    quantization: dict[str, Any] | None
    layer_overrides: dict[str, Any]
    memory: int
    cache_per_token: int | None
    tokenizer: TokenizerInfo | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self)


def describe(checkpoint: AnyCheckpoint) -> Description:
    """Describe an open checkpoint. Reads only headers and the tokenizer.

    Missing tensors and wrong shapes are errors of `open_checkpoint`.
    """
    config = checkpoint.config if isinstance(checkpoint, Checkpoint) else None
    runtime, problem = "mlxlm's own decoder", None
    limits: list[str] = []
    if isinstance(checkpoint, MlxLmCheckpoint):
        runtime = f"mlx_lm: mlxlm's decoder has no {checkpoint.unsupported_reason}"
        try:
            _, limit = build_with_mlx_lm(checkpoint)
            limits = [f"texts end at {limit[0]} tokens: mlx_lm's model ignores {limit[1]} beyond"] if limit else []
        except CheckpointError as error:
            problem = str(error)
    parameters = sum(math.prod(tensor.shape) for tensor in dequantized_tensors(checkpoint).values())
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    quantization = config.quantization if config else get_quantization_config(checkpoint.hf_config)
    plan = dict(quantization) if isinstance(quantization, Mapping) else {}
    layer_overrides = {name: entry for name, entry in plan.items() if isinstance(entry, Mapping | bool)}
    default = {name: entry for name, entry in plan.items() if name not in layer_overrides}
    tokenizer, warnings = _tokenizer(checkpoint, config)
    if config is not None and (own := compatibility_warning(config)):
        warnings.append(own)
    warnings += limits
    unused = [name for name in layer_overrides if f"{name}.weight" not in checkpoint.tensors]
    if unused:
        warnings.append(f"the quantization names {unused[0]}, which has no weight (and {len(unused) - 1} more)")
    return Description(
        path=str(checkpoint.path),
        format=checkpoint.format,
        family=str(checkpoint.hf_config.get("model_type", "unnamed")),
        runtime=runtime,
        problem=problem,
        architecture=_architecture(config) if config is not None else {},
        tensors=len(checkpoint.tensors),
        parameters=parameters,
        bytes=size,
        bits_per_weight=8 * size / max(parameters, 1),
        types=_types(checkpoint),
        quantization=default or None,
        layer_overrides=layer_overrides,
        memory=weights_memory(checkpoint, parameters),
        cache_per_token=None if config is None else config.kv_bytes_per_token(4 if ON_CPU else 2),
        tokenizer=tokenizer,
        warnings=warnings,
    )


def _types(checkpoint: AnyCheckpoint) -> dict[str, tuple[int, int]]:
    """Stored types, the one with most bytes first."""
    counts = Counter(tensor.stored_dtype for tensor in checkpoint.tensors.values())
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.stored_dtype] += tensor.nbytes
    return {name: (counts[name], size) for name, size in sizes.most_common()}


def _tokenizer(checkpoint: AnyCheckpoint, config: ModelConfig | None) -> tuple[TokenizerInfo | None, list[str]]:
    try:
        tokenizer = checkpoint.load_tokenizer()
    except TokenizerError as error:
        return None, [str(error)]
    names, size = tokenizer.special_token_names, tokenizer.vocab_size
    ends = names.get("bos"), names.get("eos")
    facts = TokenizerInfo(
        tokenizer.tokenizer_type, size, tokenizer.special_tokens, *ends, tokenizer.chat_template is not None
    )
    if config is None or size <= config.vocab_size:
        return facts, []
    return facts, [f"the tokenizer has {size} tokens and the model {config.vocab_size}: it can't be used"]


def _widths(c: ModelConfig) -> str:
    """The width of the feed-forward, or of the experts."""
    if c.num_experts is None:
        return str(c.intermediate_size)
    shared = f" and a shared one of {c.shared_expert_intermediate_size}" if c.shared_expert_intermediate_size else ""
    dense = sum(c.mlp(layer) == "mlp" for layer in range(c.num_hidden_layers))
    others = f", {c.intermediate_size} in {dense} of {c.num_hidden_layers} layers" if dense else ""
    active = f", {human_count(c.active_parameter_count())} parameters are active"
    return f"{c.num_experts_per_tok} of {c.num_experts} experts of {c.moe_intermediate_size}{shared}{others}{active}"


def _architecture(c: ModelConfig) -> dict[str, str]:
    norm = NORMS[c.norm].description
    parallel = ", attention and feed-forward in parallel" if c.parallel_residual else ""
    biases = {"attention": c.attention_bias, "feed-forward": c.mlp_bias, "head": c.head_bias}
    limit = "" if c.swiglu_limit is None else f", clamped at {c.swiglu_limit:g}"
    caps = {"attention scores": c.attn_logit_softcapping, "logits": c.final_logit_softcapping}
    multipliers = {"embeddings": c.embedding_multiplier, "residual": c.residual_multiplier}
    multipliers["logits"] = 1 / c.logits_scaling
    chunks = sum(c.chunk(layer) is not None for layer in range(c.num_hidden_layers))
    windows = sum(window is not None for window in attention_windows(c)) - chunks
    mixers = Counter(map(c.mixer, range(c.num_hidden_layers)))
    convolutions, delta, mamba = mixers["short_conv"], mixers["gated_delta"], mixers["mamba2"]
    linear = (
        f"gated delta rule, {c.linear_num_value_heads} heads of {c.linear_key_head_dim} x {c.linear_value_head_dim}"
    )
    state_space = f"Mamba 2, {c.mamba_n_heads} heads of {c.mamba_d_head}, states of {c.mamba_d_state}"
    mlps = sum(map(c.has_mlp, range(c.num_hidden_layers)))
    some = f", in {mlps} layers" if mlps < c.num_hidden_layers else ""
    parts = {
        "layers": f"{c.num_hidden_layers}, width {c.hidden_size}",
        "attention": _attention(c) + (f", in {mixers['attention']} layers" if len(mixers) > 1 else ""),
        "convolutions": f"gated, of {c.conv_L_cache} tokens, in {convolutions} layers" if convolutions else "",
        "linear attention": f"{linear}, in {delta} layers" if delta else "",
        "state space": f"{state_space}, in {mamba} layers" if mamba else "",
        "feed-forward": f"{_widths(c)}, {c.hidden_act}{', gated' if c.mlp_gated else ''}{limit}{some}",
        "norms": f"{norm} {c.layer_norms.description}{parallel}, epsilon {c.rms_norm_eps:g}",
        "positions": _positions(c),
        "context": f"{c.max_position_embeddings} tokens",
        "vocabulary": f"{c.vocab_size}, {'tied' if c.tie_word_embeddings else 'untied'} head",
        "biases": ", ".join(name for name, value in biases.items() if value),
        "window": f"{c.sliding_window} tokens in {windows} of {c.num_hidden_layers} layers" if windows else "",
        "chunks": f"{c.attention_chunk_size} tokens in {chunks} of {c.num_hidden_layers} layers" if chunks else "",
        "multipliers": ", ".join(f"{name} {value:g}" for name, value in multipliers.items() if value != 1),
        "soft caps": ", ".join(f"{name} at {cap:g}" for name, cap in caps.items() if cap),
    }
    return {name: text for name, text in parts.items() if text}


def _attention(c: ModelConfig) -> str:
    heads, kv = c.num_attention_heads, c.num_key_value_heads
    if c.kv_lora_rank is not None:
        queries = "" if c.q_lora_rank is None else f", queries of {c.q_lora_rank}"
        sizes = f"{heads} heads of {c.head_dim} and {c.v_head_dim} for values"
        return f"multi-head latent, {sizes}; latent vectors of {c.kv_lora_rank}{queries}"
    kind = "multi-head" if kv == heads else "multi-query" if kv == 1 else "grouped-query"
    shared = "" if kv == heads else f" on {kv} key-value head{'s' if kv > 1 else ''}"
    norm = "" if c.qk_norm is None else f"; queries and keys have {QK_NORMS[c.qk_norm]}"
    clip = "" if c.clip_qkv is None else f", clipped at {c.clip_qkv:g}"
    sinks = ", with sinks" if c.attention_sinks else ""
    gate = ", gated" if c.attn_output_gate else ""
    return f"{kind}, {heads} heads of {c.head_dim}{shared}{clip}{sinks}{gate}{norm}"


def _positions(c: ModelConfig) -> str:
    if c.positions != "rope":
        return c.positions.replace("alibi", "ALiBi")
    text = f"rotary, base {c.rope_theta:g}"
    if c.qk_rope_head_dim is not None:
        text += f", {c.qk_rope_head_dim} dimensions of a head"
    if c.partial_rotary_factor != 1:
        text += f", {100 * c.partial_rotary_factor:g} % of a head"
    if c.rope_scaling:
        factor = c.rope_scaling.get("factor")
        text += f", {c.rope_scaling['rope_type']} scaling" + (f" by {factor:g}" if factor else "")
    if c.rope_local_base_freq:
        text += f"; base {c.rope_local_base_freq:g} in layers with a window"
    if c.rope_layers:
        text += f"; in {sum(c.rope_layers)} of {c.num_hidden_layers} layers"
    if c.attn_scale or (c.rope_scaling or {}).get("llama_4_scaling_beta"):
        text += "; queries scaled by their position"
    return text
