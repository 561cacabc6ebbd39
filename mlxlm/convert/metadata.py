"""Compare the configuration and tokenizer of an output with those of its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.config import ModelConfig
from mlxlm.convert.compare import config_diff
from mlxlm.model.positions import RotaryEmbedding
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, TokenizerError

SAMPLE_TEXT = """\
The lighthouse keeper wrote down the weather every morning: the wind, the height of the waves, and whether
the mail boat could land. In March 1911 it could not for nineteen days. "We have flour," he noted, "and oil for the
lamp, and two books that I know by heart." On the twentieth day he counted 3 ships and 1 whale.

def area(width, height):
    return width * height  # in square metres
"""
# Further texts: numbers, other scripts and signs, runs of spaces, what looks like a special token. None begins with
# a space or is written decomposed, where tokenizers are known to differ between formats.
_TEXTS = (
    SAMPLE_TEXT,
    "naïve café, Straße; 東京都は日本の首都です。 Привет, мир! שלום 👩‍👩‍👧🎉 1,234.56 ½ ² …—“quotes”",
    "x\t=\t1\r\n\n\n\ny  =   2    # DON'T we'll <s> </s> <|endoftext|> <|im_start|>user [INST] <unk>",
)
_ROLES = ("bos", "eos", "pad", "unk")
# Fields that a format can't represent, or represents differently: changes are reported, and no error.
_NOT_CARRIED = {
    "gguf": {"model_type", "tie_word_embeddings", "hidden_act", "bos_token_id", "pad_token_id"},
    "llama2.c": {"model_type", "bos_token_id", "pad_token_id"},
}
_ENDS_IN_GGUF = 3  # token ids
_NEAR = 1e-6  # relative: formats keep numbers in float32


@dataclass(frozen=True)
class Check:
    """The result of one comparison.

    Attributes:
        name: What was compared.
        result: "equal", "within rounding", "in part" (the format can't represent all of it) or "skipped".
        detail: One phrase.
    """

    name: str
    result: str
    detail: str


def check_metadata(source: WritableCheckpoint, written: WritableCheckpoint, label: str) -> list[Check]:
    """Compare the tokenizer and configuration of an output, called `label` in errors, with those of its source.

    Raises:
        CheckpointError: Something was lost or changed that the format can represent.
    """
    try:
        before = source.load_tokenizer()
    except TokenizerError:
        skipped = Check("tokenizer", "skipped", "the source has none that mlxlm can read")
        return [skipped, _check_configuration(source, written, None, None, label)]
    try:
        after = written.load_tokenizer()
    except TokenizerError as error:
        raise CheckpointError(f"{label}: its tokenizer can't be read: {error.message}") from None
    checked = _check_tokenizer(before, after, written.format, label)
    return [checked, _check_configuration(source, written, before, after, label)]


def _end_ids(checkpoint: WritableCheckpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end a text, of the configuration and of the tokenizer, as in generation."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    return checkpoint.config.eos_token_ids | (frozenset() if own is None else {own})


def _check_configuration(
    source: WritableCheckpoint,
    written: WritableCheckpoint,
    before: Tokenizer | None,
    after: Tokenizer | None,
    label: str,
) -> Check:
    changes = config_diff(source, written)
    ends, ends_after = _end_ids(source, before), _end_ids(written, after)
    same = {"eos_token_id"} if ends == ends_after else set()
    if isinstance(source, Checkpoint) and isinstance(written, Checkpoint):
        same.update(_same_meaning(source.config, written.config, before))
    changes = {name: values for name, values in changes.items() if name not in same}
    allowed = _NOT_CARRIED.get(written.format, set())
    if written.format == "gguf" and len(ends) > _ENDS_IN_GGUF and ends_after < ends:
        allowed = allowed | {"eos_token_id"}
    for name, (was, now) in changes.items():
        if name not in allowed:
            raise CheckpointError(f"{label}: the configuration's {name} is {now!r} and was {was!r} in {source.path}")
    if not changes:
        return Check("configuration", "equal", "all fields")
    lost = ", ".join(f"{name} ({was!r} becomes {now!r})" for name, (was, now) in changes.items())
    return Check("configuration", "in part", f"the format can't represent {lost}")


def _check_tokenizer(before: Tokenizer, after: Tokenizer, format: str, label: str) -> Check:
    lost = []
    if format == "llama2.c":
        lost = ["chat template"] if before.chat_template else []
        ids = ((role, getattr(before, f"{role}_token_id"), getattr(after, f"{role}_token_id")) for role in _ROLES)
        lost += [f"{role} token" for role, was, now in ids if was is not None and now is None]
    for problem in _tokenizer_problems(before, after):
        if not any(name in problem for name in lost):
            raise CheckpointError(f"{label}: its tokenizer differs from the source's: {problem}")
    kept = f"equal ids of {len(_TEXTS)} texts and special tokens"
    if lost:
        return Check("tokenizer", "in part", f"{kept}; the format can't represent {', '.join(lost)}")
    return Check("tokenizer", "equal", kept + (", equal chat template" if before.chat_template else ""))


def _tokenizer_problems(before: Tokenizer, after: Tokenizer) -> Iterator[str]:
    for text in _TEXTS:
        ids, others = before.encode(text), after.encode(text)
        if ids != others:
            at = next((i for i, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), 0)
            shown = before.decode(ids[at : at + 4]) or text[:16]
            yield f"other tokens at {shown!r}, {others[at : at + 3]} instead of {ids[at : at + 3]}"
        if before.decode(ids) != after.decode(ids):
            yield f"the tokens of {text[:16]!r} decode to another text"
    for role in _ROLES:
        was, now = getattr(before, f"{role}_token_id"), getattr(after, f"{role}_token_id")
        if was is not None and was != now:
            yield f"the {role} token is {now} and was {was}"
    for text, id in before.special_tokens.items():
        if after.special_tokens.get(text) != id:
            yield f"{text!r} is not a special token with id {id}"
    if (before.chat_template or None) != (after.chat_template or None):
        yield "the chat template differs"


def _same_meaning(a: ModelConfig, b: ModelConfig, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Fields whose two values mean the same."""
    if all((a.window(i), a.mixer(i)) == (b.window(i), b.mixer(i)) for i in range(a.num_hidden_layers)):
        yield from ("sliding_window", "layer_types")
    if _biases(a) == _biases(b):
        yield from ("attention_bias", "attention_out_bias")
    if _same_rotation(a, b):
        yield from ("rope_theta", "rope_scaling", "partial_rotary_factor")
    for name in ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and y is not None and math.isclose(x, y, rel_tol=_NEAR):
            yield name
    for role in ("bos", "eos", "pad"):
        name = f"{role}_token_id"
        if getattr(a, name) is None and getattr(b, name) == getattr(tokenizer, name, None):
            yield name  # a format with one field for it has the tokenizer's


def _biases(config: ModelConfig) -> tuple[bool, bool]:
    out = config.attention_out_bias
    return config.attention_bias, config.attention_bias if out is None else out


def _same_rotation(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether rotary positions have the same angles, however they are configured."""
    if a.positions != "rope" or b.positions != "rope":
        return a.positions == b.positions
    if a.rotary_dims != b.rotary_dims:
        return False
    one, two = RotaryEmbedding(a), RotaryEmbedding(b)
    dynamic = [(rope.rope_type, rope.scaling_factor) for rope in (one, two) if rope.rope_type == "dynamic"]
    if len(dynamic) == 1 or len(set(dynamic)) > 1:
        return False
    if one.longrope_threshold != two.longrope_threshold or not math.isclose(one.base, two.base, rel_tol=_NEAR):
        return False
    tables = ("wavelengths", "long_wavelengths", "query_scale")
    return all(_near(getattr(one, name), getattr(two, name)) for name in tables)


def _near(a: mx.array | None, b: mx.array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and mx.allclose(a, b, rtol=10 * _NEAR, atol=0).item()
