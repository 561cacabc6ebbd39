"""Variants of a model and its training: what differs between the runs of a sweep."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mlxlm.config import ModelConfig
from mlxlm.config.overrides import apply_overrides, infer_field, parse_overrides, parse_value
from mlxlm.families import load_preset, resolve_model_type
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.errors import ConfigError

BASE = "base"  # the variant that changes nothing
SETTINGS = {field.name: str(field.type) for field in fields(TrainSettings)}
# What all variants share, and why.
_SHARED = {
    **dict.fromkeys(("steps", "time_limit"), "one budget for all variants"),
    **dict.fromkeys(("eval_every", "eval_tokens", "packing"), "the same for all variants"),
    **dict.fromkeys(("document_mask", "mask_prompt"), "the same for all variants"),
    "vocab_size": "one tokenizer for all variants",
    "max_position_embeddings": "max_seq_length",
}
_RESERVED_NAMES = ("data", "sweep.html", "sweep.json", "sweep.png", "comparison.json", "comparison.png")
_MAX_NAME_BYTES = 100  # of a variant's folder; file systems allow 255, and file names are made from it


@dataclass(frozen=True)
class Variant:
    """A variant of a model and its training.

    Attributes:
        name: Its name.
        parts: Overrides of the model, see `mlxlm.config.overrides`; "preset" replaces it first.
        settings: Fields of `TrainSettings` of this variant, such as dropout and learning_rate.
    """

    name: str
    parts: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a variant.

        Args:
            text: "NAME: PART=VALUE, ...", such as "wide: hidden_size=256, dropout=0.1"; "PART=VALUE, ..." without a
                name; a value that only one part has ("alibi", "swiglu"); or "base".

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
            values = parse_overrides(split_at_commas(assignments))
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
            parts, length = dict(self.parts), self.settings.get("max_seq_length", config.max_position_embeddings)
            if preset := parts.pop("preset", None):
                config = load_preset(preset, vocab_size=config.vocab_size)
            config = config.with_changes(max_position_embeddings=length)  # some overrides depend on it
            return resolve_model_type(apply_overrides(config, parts, SETTINGS | _SHARED))


@contextmanager
def variant_errors(name: str) -> Iterator[None]:
    """Prefix a ConfigError with the name of the variant."""
    try:
        yield
    except ConfigError as error:
        raise error.prefixed(f"variant {name}") from None


def split_at_commas(text: str) -> list[str]:
    """Split at commas, except inside JSON."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces


def check_names(variants: Sequence[Variant]) -> None:
    """Raise ConfigError if there are fewer than two variants, or they can't have a folder each."""
    if len(variants) < 2:
        raise ConfigError("there is nothing to compare: two variants are needed", "learning_rate=1e-3 and 3e-3")
    # macOS doesn't distinguish names by case or by the composition of accents.
    folders = [unicodedata.normalize("NFC", variant.folder).casefold() for variant in variants]
    for variant, folder in zip(variants, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"two variants are called {variant.folder}", '"another name: ..."')
        if folder in _RESERVED_NAMES:
            raise ConfigError(f"a variant can't be called {variant.folder}", '"another name: ..."')
        if not variant.name.isprintable() or len(folder.encode()) > _MAX_NAME_BYTES:
            problem = f"{ascii(variant.name[:20])} can't be the name of a variant, which names a folder"
            raise ConfigError(problem, f"at most {_MAX_NAME_BYTES} printable letters")


@dataclass(frozen=True)
class Variation:
    """The values of one option in a sweep: a list, or a range to draw from.

    Attributes:
        name: A setting, a part of the model, or "preset".
        values: The values of a list, as text.
        bounds: The ends of a range.
    """

    name: str
    values: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Parse "NAME=VALUE,VALUE,..." or "NAME=LOW..HIGH". Raises ConfigError for other text."""
        name, _, values = (part.strip() for part in text.partition("="))
        low, dots, high = values.partition("..")
        listed = tuple(value.strip() for value in split_at_commas(values))
        hint = "learning_rate=1e-3,3e-3, or learning_rate=1e-4..1e-2"
        if not name or not all(listed):
            raise ConfigError(f"{text!r} varies nothing", hint)
        if not dots:
            return cls(name.replace("-", "_"), listed)
        try:
            bounds = float(low), float(high)
        except ValueError:
            bounds = math.nan, math.nan
        if not 0 <= bounds[0] < bounds[1] < math.inf:
            raise ConfigError(f"{text!r} is no range of numbers from 0 up", hint)
        return cls(name.replace("-", "_"), bounds=bounds)

    def draw(self, rng: np.random.Generator) -> str:
        """Draw a value: of a range log-uniformly, or uniformly if it begins at 0; a whole number if the ends are."""
        if self.bounds is None:
            return str(rng.choice(self.values))
        low, high = self.bounds
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if low else rng.uniform(low, high)
        whole = low.is_integer() and high.is_integer() and high > 1
        return str(round(value)) if whole else f"{value:.3g}"


def vary(variations: Sequence[Variation], samples: int | None = None, seed: int = 0) -> list[Variant]:
    """Return all combinations of the values, or `samples` different ones, drawn at random.

    Random draws find a good combination sooner if only some of the options matter (Bergstra & Bengio 2012).

    Raises:
        ConfigError: A range without `samples`, fewer combinations than `samples`, or an impossible variant.
    """
    if samples is None:
        if ranges := [variation.name for variation in variations if variation.bounds]:
            raise ConfigError(f"{ranges[0]} is a range, of which values are drawn", "`samples=16`, or a list of values")
        combinations = list(itertools.product(*(variation.values for variation in variations)))
    else:
        rng, drawn = np.random.default_rng(seed), dict[tuple[str, ...], None]()
        for _ in range(100 * samples):
            if len(drawn) < samples:
                drawn[tuple(variation.draw(rng) for variation in variations)] = None
        if len(drawn) < samples:
            raise ConfigError(f"there are fewer than {samples} combinations to draw", f"`samples={len(drawn)}`")
        combinations = list(drawn)
    names = [variation.name for variation in variations]
    pairs = [zip(names, combination, strict=True) for combination in combinations]
    return [Variant.parse(", ".join(f"{name}={value}" for name, value in each)) for each in pairs]
