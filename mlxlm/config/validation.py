"""Every problem of a configuration at once, each with a value that would work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlxlm.config import quantization
from mlxlm.config.numbers import MAX_SIZE, is_count, is_int, is_positive
from mlxlm.config.rope_scaling import rope_problems
from mlxlm.utils.errors import short_repr

if TYPE_CHECKING:
    from mlxlm.config.model_config import ModelConfig

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "sigmoid")
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of `layer_types`
MAX_LAYERS = 10_000  # no decoder is near it, and a list of so many names is cheap
_MOST_TOKENS = 1 << 24  # of a vocabulary: an id beyond is damage
_COUNTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim",
)  # fmt: skip
CHOICES = {
    "norm": ("rms", "layer"),
    "norm_placement": ("pre", "post", "output", "both"),
    "positions": ("rope", "learned", "sinusoidal", "alibi", "none"),
    "qk_norm": (None, "head", "projection"),
    "hidden_act": ACTIVATIONS,
}
_POSITIVE = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "embedding_multiplier")
_POSITIVE_OR_NONE = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_SWITCHES = (
    "attention_bias", "mlp_bias", "tie_word_embeddings", "norm_unit_offset", "parallel_residual", "shared_norm",
    "alibi_scaled", "mlp_gated", "embedding_norm",
)  # fmt: skip


def is_unused_id(id: Any, vocab_size: Any) -> bool:
    """Whether a token id lies behind the vocabulary, and not so far behind it that the file must be damaged."""
    return type(id) is int and is_count(vocab_size) and vocab_size <= id < _MOST_TOKENS


def config_errors(c: ModelConfig, head_dim_given: bool) -> Iterator[str]:
    """What keeps the ModelConfig `c` from working, one phrase each."""
    bad = [name for name in _COUNTS if not is_count(getattr(c, name))]
    for name in bad:
        yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive whole number"
    fields = [*_field_problems(c)]
    yield from fields
    if not bad:
        yield from _size_problems(c, head_dim_given)
        if not fields:
            yield from _combination_problems(c)
            if c.parameter_count() > 10**13:
                yield f"it has {c.parameter_count():.3g} parameters, check hidden_size and num_hidden_layers"
    if c.quantization is not None:
        yield from quantization.config_errors(c.quantization)
    yield from _token_problems(c)


def _token_problems(c: ModelConfig) -> Iterator[str]:
    """Old files have -1 for a token that there isn't, and fine-tuned models padding behind their vocabulary, which no
    text has."""
    size = c.vocab_size if is_count(c.vocab_size) else MAX_SIZE
    ends = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
    if any(not (i is None or (is_int(i) and 0 <= i < size)) for i in ends):
        yield f"eos_token_id is {short_repr(c.eos_token_id)}, it must be a token id below {size} or a list of them"
    for name, most in (("bos_token_id", size), ("pad_token_id", MAX_SIZE)):
        value = getattr(c, name)
        if value is not None and not (is_int(value) and -1 <= value < most):
            yield f"{name} is {short_repr(value)}, it must be a token id below {most} or null"


def _field_problems(c: ModelConfig) -> Iterator[str]:
    """Fields that no other field can make right."""
    for name in _POSITIVE:
        if not is_positive(getattr(c, name)):
            yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive number"
    for name in _POSITIVE_OR_NONE:
        if getattr(c, name) is not None and not is_positive(getattr(c, name)):
            yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive number or null"
    for name in _SWITCHES:
        if not isinstance(getattr(c, name), bool):
            yield f"{name} is {short_repr(getattr(c, name))}, it must be true or false"
    if not isinstance(c.model_type, str):
        yield f"model_type is {short_repr(c.model_type)}, it must be a string (llama)"
    if c.attention_out_bias not in (None, True, False):
        yield f"attention_out_bias is {short_repr(c.attention_out_bias)}, it must be true, false or null"
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            yield f"{name} is {short_repr(getattr(c, name))}, it must be one of {', '.join(map(str, choices))}"
    if is_positive(c.partial_rotary_factor) and c.partial_rotary_factor > 1:
        yield f"partial_rotary_factor is {short_repr(c.partial_rotary_factor)}, it must be at most 1"
    if not is_count(c.position_offset) and c.position_offset != 0:
        yield f"position_offset is {short_repr(c.position_offset)}, it must be a whole number (0)"
    if c.sliding_window is not None and not is_count(c.sliding_window):
        yield f"sliding_window is {short_repr(c.sliding_window)}, it must be a positive whole number or null"


def _size_problems(c: ModelConfig, head_dim_given: bool) -> Iterator[str]:
    heads, kv = c.num_attention_heads, c.num_key_value_heads
    if heads % kv:
        fits = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
        yield f"num_key_value_heads {kv} does not divide num_attention_heads {heads} (one of {fits} does)"
    if c.hidden_size % heads and not head_dim_given:
        fits = heads * -(-c.hidden_size // heads)
        yield f"hidden_size {c.hidden_size} is no multiple of num_attention_heads {heads} ({fits} is), head_dim is null"
    if c.num_hidden_layers > MAX_LAYERS:
        yield f"num_hidden_layers is {c.num_hidden_layers}, at most {MAX_LAYERS} are possible"


def _combination_problems(c: ModelConfig) -> Iterator[str]:
    """What fields ask of each other, each of them being right for itself."""
    if c.positions == "rope":
        yield from rope_problems(c)
    rows = c.max_position_embeddings + c.position_offset
    if c.positions in ("learned", "sinusoidal") and rows > MAX_SIZE:
        yield f"max_position_embeddings makes a table of {rows} rows, at most {MAX_SIZE} are possible"
    if c.parallel_residual and c.norm_placement != "pre":
        yield f"parallel_residual needs norm_placement pre, not {c.norm_placement}"
    if c.shared_norm and not c.parallel_residual:
        yield "shared_norm is true, but one norm serves both sublayers only where parallel_residual is true"
    if c.norm_unit_offset and c.norm != "rms":
        yield "norm_unit_offset is true, which only the norm rms has"
    if c.layer_types is None:
        return
    if not isinstance(c.layer_types, tuple) or any(kind not in (FULL, SLIDING) for kind in c.layer_types):
        yield f"layer_types must be a list of {FULL} and {SLIDING}"
    elif len(c.layer_types) != c.num_hidden_layers:
        yield f"layer_types has {len(c.layer_types)} entries, one for each of {c.num_hidden_layers} layers is needed"
    elif SLIDING in c.layer_types and c.sliding_window is None:
        yield f"layer_types has {SLIDING}, but sliding_window is null (4096)"
