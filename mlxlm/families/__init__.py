"""Families of decoders: tables between Hugging Face's names and the one decoder's. No family has code of its own
in the model: it is a configuration of the same parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxlm.families.stored import Stored


@dataclass(frozen=True)
class Family:
    """What a `model_type` of Hugging Face is called, and how its files lie.

    `fields`: ModelConfig's name -> Hugging Face's, where they differ. `always`: ModelConfig's values that each
    model of the family has. `layout`: a ModelConfig -> how its modules are stored; modules it doesn't name are
    stored under the decoder's own names.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    layout: Callable[[Any], Iterable[Stored]] = lambda config: ()


FAMILIES = {"llama": Family("llama", "LlamaForCausalLM")}
