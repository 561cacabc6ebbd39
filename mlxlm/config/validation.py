"""Validation of a configuration: all problems at once, each with a value that would work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mlxlm.config.components import CHOICES, FULL, NORM_PLACEMENTS, NORMS, POSITIONS, SLIDING
from mlxlm.config.numbers import MAX_SIZE, is_count, is_int, is_positive
from mlxlm.config.quantization import validate_quantization
from mlxlm.config.rope_scaling import validate_rope
from mlxlm.utils.errors import short_repr

if TYPE_CHECKING:
    from mlxlm.config.model_config import ModelConfig

MAX_LAYERS = 10_000  # far more than any decoder has, and few enough for a list of names
_MAX_TOKEN_ID = 1 << 24  # a larger id means that the file is damaged
_MAX_PARAMETERS = 10**13

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
    counts = [field.name for field in fields(c) if field.type == "int" and field.name != "position_offset"]
    bad_counts = [name for name in counts if not is_count(getattr(c, name))]
    for name in bad_counts:
        yield f"{name} is {short_repr(getattr(c, name))}, it must be a positive whole number"
    field_errors = list(_validate_fields(c))
    yield from field_errors
    if not bad_counts:
        yield from _validate_sizes(c, explicit_head_dim)
        if not field_errors:
            yield from _validate_combinations(c)
            if c.parameter_count() > _MAX_PARAMETERS:
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
    if not is_count(c.position_offset) and c.position_offset != 0:
        yield f"position_offset is {short_repr(c.position_offset)}, it must be a whole number (0)"
    if c.sliding_window is not None and not is_count(c.sliding_window):
        yield f"sliding_window is {short_repr(c.sliding_window)}, it must be a positive whole number or null"


def _validate_sizes(c: ModelConfig, explicit_head_dim: bool) -> Iterator[str]:
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    if heads % kv_heads:
        divisors = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
        yield f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads} (one of {divisors} does)"
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
    if c.positions == "rope":
        yield from validate_rope(c)
    rows = c.max_position_embeddings + c.position_offset
    if POSITIONS[c.positions].table and rows > MAX_SIZE:
        yield f"max_position_embeddings makes a table of {rows} rows, at most {MAX_SIZE} are possible"
    if c.parallel_residual and NORM_PLACEMENTS[c.norm_placement].attention_output:
        yield f"parallel_residual needs norm_placement pre, not {c.norm_placement}"
    if c.shared_norm and not c.parallel_residual:
        yield "shared_norm is true, but sublayers share a norm only if parallel_residual is true"
    if c.norm_unit_offset and not NORMS[c.norm].unit_offset:
        yield f"norm_unit_offset is true, but the norm {c.norm} has no such offset (rms has)"
    if c.layer_types is not None:
        yield from _validate_layer_types(c)


def _validate_layer_types(c: ModelConfig) -> Iterator[str]:
    if not isinstance(c.layer_types, tuple) or any(kind not in (FULL, SLIDING) for kind in c.layer_types):
        yield f"layer_types must be a list of {FULL} and {SLIDING}"
    elif len(c.layer_types) != c.num_hidden_layers:
        yield f"layer_types has {len(c.layer_types)} entries, one for each of {c.num_hidden_layers} layers is needed"
    elif SLIDING in c.layer_types and c.sliding_window is None:
        yield f"layer_types has {SLIDING}, but sliding_window is null (4096)"


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
