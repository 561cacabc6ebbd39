"""Every problem of a configuration at once, each with a value that would work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlxlm.config import quantization
from mlxlm.families import FAMILIES
from mlxlm.families.activations import ACTIVATIONS
from mlxlm.families.rotary import SCALINGS
from mlxlm.families.windows import FULL, MOST_LAYERS, SLIDING
from mlxlm.utils.errors import shortened

_MAX = 2**31 - 1  # sizes beyond this can't be array dimensions in MLX
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
    "model_type": tuple(FAMILIES),
}
_POSITIVE = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "embedding_multiplier")
_POSITIVE_OR_NONE = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_SWITCHES = (
    "attention_bias", "mlp_bias", "tie_word_embeddings", "norm_unit_offset", "parallel_residual", "shared_norm",
    "alibi_scaled", "mlp_gated", "embedding_norm",
)  # fmt: skip
_OPTIONAL_SCALING = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

_LEAST, _MOST = 1e-6, 1e12  # beyond these, products of scalings leave float32
_BOUNDS = f" from {_LEAST} to {_MOST}"


def is_count(value: Any) -> bool:
    return _is_int(value) and 0 < value <= _MAX


def is_unused_id(id: Any, vocab_size: Any) -> bool:
    """Whether a token id lies behind the vocabulary, and not so far behind it that the file must be damaged."""
    return type(id) is int and is_count(vocab_size) and vocab_size <= id < _MOST_TOKENS


def problems(c: Any, head_dim_given: bool) -> Iterator[str]:
    """What keeps the ModelConfig `c` from working, one phrase each."""
    bad = [name for name in _COUNTS if not is_count(getattr(c, name))]
    for name in bad:
        yield f"{name} is {shortened(getattr(c, name))}, it must be a positive whole number"
    fields = [*_field_problems(c)]
    yield from fields
    if not bad:
        yield from _size_problems(c, head_dim_given)
        if not fields:
            yield from _combination_problems(c)
            if c.parameter_count() > 10**13:
                yield f"it has {c.parameter_count():.3g} parameters, check hidden_size and num_hidden_layers"
    if c.quantization is not None:
        yield from quantization.problems(c.quantization)
    yield from _token_problems(c)


def _token_problems(c: Any) -> Iterator[str]:
    """Old files have -1 for a token that there isn't, and fine-tuned models padding behind their vocabulary, which no
    text has."""
    size = c.vocab_size if is_count(c.vocab_size) else _MAX
    ends = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
    if any(not (i is None or (_is_int(i) and 0 <= i < size)) for i in ends):
        yield f"eos_token_id is {shortened(c.eos_token_id)}, it must be a token id below {size} or a list of them"
    for name, most in (("bos_token_id", size), ("pad_token_id", _MAX)):
        value = getattr(c, name)
        if value is not None and not (_is_int(value) and -1 <= value < most):
            yield f"{name} is {shortened(value)}, it must be a token id below {most} or null"


def _field_problems(c: Any) -> Iterator[str]:
    """Fields that no other field can make right."""
    for name in _POSITIVE:
        if not _is_positive(getattr(c, name)):
            yield f"{name} is {shortened(getattr(c, name))}, it must be a positive number"
    for name in _POSITIVE_OR_NONE:
        if getattr(c, name) is not None and not _is_positive(getattr(c, name)):
            yield f"{name} is {shortened(getattr(c, name))}, it must be a positive number or null"
    for name in _SWITCHES:
        if not isinstance(getattr(c, name), bool):
            yield f"{name} is {shortened(getattr(c, name))}, it must be true or false"
    if c.attention_out_bias not in (None, True, False):
        yield f"attention_out_bias is {shortened(c.attention_out_bias)}, it must be true, false or null"
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            yield f"{name} is {shortened(getattr(c, name))}, it must be one of {', '.join(map(str, choices))}"
    if _is_positive(c.partial_rotary_factor) and c.partial_rotary_factor > 1:
        yield f"partial_rotary_factor is {shortened(c.partial_rotary_factor)}, it must be at most 1"
    if not is_count(c.position_offset) and c.position_offset != 0:
        yield f"position_offset is {shortened(c.position_offset)}, it must be a whole number (0)"
    if c.sliding_window is not None and not is_count(c.sliding_window):
        yield f"sliding_window is {shortened(c.sliding_window)}, it must be a positive whole number or null"


def _size_problems(c: Any, head_dim_given: bool) -> Iterator[str]:
    heads, kv = c.num_attention_heads, c.num_key_value_heads
    if heads % kv:
        fits = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
        yield f"num_key_value_heads {kv} does not divide num_attention_heads {heads} (one of {fits} does)"
    if c.hidden_size % heads and not head_dim_given:
        fits = heads * -(-c.hidden_size // heads)
        yield f"hidden_size {c.hidden_size} is no multiple of num_attention_heads {heads} ({fits} is), head_dim is null"
    if c.num_hidden_layers > MOST_LAYERS:
        yield f"num_hidden_layers is {c.num_hidden_layers}, at most {MOST_LAYERS} are possible"


def _combination_problems(c: Any) -> Iterator[str]:
    """What fields ask of each other, each of them being right for itself."""
    if c.positions == "rope":
        yield from _rotary_problems(c)
    rows = c.max_position_embeddings + c.position_offset
    if c.positions in ("learned", "sinusoidal") and rows > _MAX:
        yield f"max_position_embeddings makes a table of {rows} rows, at most {_MAX} are possible"
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


def _rotary_problems(c: Any) -> Iterator[str]:
    dims = c.rotary_dims
    if dims % 2 and c.partial_rotary_factor == 1:
        yield f"head_dim {dims} is odd, rotary positions need an even one ({dims + 1})"
    elif dims % 2 or dims == 0:
        share = f"partial_rotary_factor {c.partial_rotary_factor} of head_dim {c.head_dim}"
        yield f"{share} is {dims} dimensions, rotary positions need an even number of them (1.0)"
    if c.rope_scaling is not None:
        yield from _scaling_problems(c, c.rope_scaling, dims)


def _scaling_problems(c: Any, scaling: Any, dims: int) -> Iterator[str]:
    kind = scaling.get("rope_type") if isinstance(scaling, Mapping) else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        yield f"rope_scaling is {shortened(scaling)}, it must be null or an object with rope_type {', '.join(SCALINGS)}"
        return
    required = [name for name in SCALINGS[kind] if name not in (*_OPTIONAL_SCALING, "truncate")]
    if kind == "longrope":
        required.remove("factor")  # the ratio of the two lengths, if it isn't given
        yield from _factor_problems(scaling, dims)
    for name in [name for name in SCALINGS[kind] if name in required or scaling.get(name) is not None]:
        value = scaling.get(name)
        if name not in ("truncate", "short_factor", "long_factor") and not _is_ratio(value):
            bounds = _BOUNDS * _is_positive(value)
            yield f"rope_scaling: {name} is {shortened(value)}, {kind} needs a positive number{bounds}"
    low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
    if kind == "llama3" and _is_positive(low) and _is_positive(high) and low >= high:
        yield f"rope_scaling: low_freq_factor {low} must be less than high_freq_factor {high}"
    if kind == "dynamic" and dims == 2:
        yield "rope_scaling: dynamic needs more than 2 rotary dimensions"
    if kind == "yarn" and c.rope_theta <= 1:
        yield f"rope_theta is {c.rope_theta}, yarn needs more than 1 (10000)"
    original = scaling.get("original_max_position_embeddings")
    if kind == "longrope" and _is_positive(original) and original <= 1:
        yield f"rope_scaling: original_max_position_embeddings is {original}, longrope needs more than 1"


def _factor_problems(scaling: Mapping[str, Any], dims: int) -> Iterator[str]:
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if not isinstance(factors, list) or len(factors) != dims // 2 or not all(map(_is_ratio, factors)):
            yield f"rope_scaling: {name} must be a list of {dims // 2} positive numbers{_BOUNDS}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """Of the numbers that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3e38


def _is_ratio(value: Any) -> bool:
    return _is_positive(value) and _LEAST <= value <= _MOST
