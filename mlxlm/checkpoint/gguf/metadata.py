"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxlm.checkpoint.gguf.reader import Array, Header
from mlxlm.utils.errors import CheckpointError


class MetadataReader:
    """Look up and check values in the metadata of one file.

    `text`, `flag` and `id` take whole keys; `count`, `number` and `has` take keys below the architecture's prefix
    ("attention.head_count" for "llama.attention.head_count"). Each raises CheckpointError, naming the key, for a value
    of another type and for a missing one without a default.
    """

    def __init__(self, header: Header):
        self.header = header
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._get(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, or the default."""
        return self._get(key, bool, "true or false", default)

    def id(self, key: str) -> int | None:
        """A token id, or None; llama.cpp's converters write 2³² - 1 for none."""
        value = self._get(key, int, "a whole number", -1)
        return value if 0 <= value < 2**31 else None

    def count(self, short: str, default: int | None = None) -> int:
        """A size, which may also be an array with the same value for each layer."""
        key = f"{self.architecture}.{short}"
        value = self.header.metadata.get(key)
        if isinstance(value, Array):
            value = self._uniform(key, value)
        else:
            value = self._get(key, int, "a whole number", default)
        if not 0 <= value < 2**31:
            raise self.error(f"{key} is {value}, it must be a size")
        return value

    def number(self, short: str, default: float | None = None) -> float:
        """A float32 as its shortest decimal: 1e-05 and not 9.999999747378752e-06."""
        value = self._get(f"{self.architecture}.{short}", (int, float), "a number", default)
        return shortest_decimal(value)

    def has(self, short: str) -> bool:
        """Whether there is such a key."""
        return f"{self.architecture}.{short}" in self.header.metadata

    def has_tensor(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self.header.tensors

    def error(self, message: str, hint: str | None = None) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self.header.path}: {message}", hint)

    def _get(self, key: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise self.error(f"the metadata lacks {key}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key} must be {expected}")
        return value

    def _uniform(self, key: str, array: Array) -> int:
        if array.holds_strings or not 0 < array.count <= len(self.header.tensors):
            raise self.error(f"{key} must be a whole number")
        values = array.read()
        if any(value != values[0] for value in values):
            raise self.error(f"{key} differs between the layers, which this decoder doesn't support")
        if type(values[0]) is not int:
            raise self.error(f"{key} must be a whole number")
        return values[0]


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is this float32."""
    return float(str(np.float32(value)))
