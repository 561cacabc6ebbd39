"""A variant of a model: changes to its configuration and to its training settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.overrides import apply_overrides, infer_field, parse_overrides, parse_value
from mlxlm.families import resolve_model_type
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.errors import ConfigError

BASE = "base"  # the variant that changes nothing
SETTINGS = {field.name: str(field.type) for field in fields(TrainSettings)}
_BUDGET_SETTINGS = ("batch_size", "max_seq_length", "grad_accumulation_steps", "steps", "time_limit")
_DATA_SETTINGS = ("eval_every", "eval_tokens", "packing", "document_mask", "mask_prompt")
# What all variants share, and why.
_SHARED = {
    **dict.fromkeys(_BUDGET_SETTINGS, "one budget for all variants"),
    **dict.fromkeys(_DATA_SETTINGS, "the same for all variants"),
    "vocab_size": "one tokenizer for all variants",
    "max_position_embeddings": "the sequence length, one for all variants",
}


@dataclass(frozen=True)
class Variant:
    """A variant of a model.

    Attributes:
        name: Its name.
        parts: Overrides of the model, see `mlxlm.config.overrides`.
        settings: Fields of `TrainSettings` of this variant, such as dropout and learning_rate.
    """

    name: str
    parts: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a variant.

        Args:
            text: "NAME: PART=VALUE, ...", such as "wide: hidden_size=256, dropout=0.1"; "PART=VALUE" alone; a value
                that only one part has ("alibi", "swiglu"); or "base".

        Raises:
            ConfigError: The text has another form, or sets what all variants share.
        """
        name, colon, assignments = (piece.strip() for piece in text.partition(":"))
        if "=" in name:  # without a name; "rope_scaling=yarn:4" has a colon too
            name, colon, assignments = text.strip(), "", text.strip()
        if not name or bool(colon) != bool(assignments) and colon:
            raise ConfigError(f"{text!r} is not a variant", '"alibi: positions=alibi"')
        if not assignments:
            parts = {} if name == BASE else infer_field(name)
            if parts is None:
                raise ConfigError(f"variant {name!r} changes nothing", f'"{name}: NAME=VALUE", or {BASE}')
            return cls(name, parts, {})
        with variant_errors(name):
            values = parse_overrides(_split_at_commas(assignments))
            for key in (key for key in values if key in _SHARED):
                raise ConfigError(f"{key} can't differ between variants", _SHARED[key])
            settings = {key: parse_value(key, value, SETTINGS[key]) for key, value in values.items() if key in SETTINGS}
        return cls(name, {key: value for key, value in values.items() if key not in settings}, settings)

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"[^\w.=-]+", "-", self.name).strip("-.") or "variant"

    def apply_to(self, config: ModelConfig) -> ModelConfig:
        """Return the variant's model. Raises ConfigError for overrides that are impossible."""
        with variant_errors(self.name):
            return resolve_model_type(apply_overrides(config, self.parts, _SHARED))


@contextmanager
def variant_errors(name: str) -> Iterator[None]:
    """Prefix a ConfigError with the name of the variant."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"variant {name}: {error.message}", error.hint) from None


def _split_at_commas(text: str) -> list[str]:
    """Split at commas, except inside JSON."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces
