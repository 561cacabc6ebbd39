"""All families, by the `model_type` of Hugging Face."""

from __future__ import annotations

from mlxlm.families.family import Family
from mlxlm.families.gpts import GPTS
from mlxlm.families.llamas import LLAMAS
from mlxlm.families.own import MLXLM

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*LLAMAS, *GPTS, MLXLM)}
