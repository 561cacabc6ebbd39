"""A model's generation_config.json: the sampling options that its authors recommend, and an example prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mlxlm.config.option import declaration, options_of
from mlxlm.generation.logit_filters import FilterOptions
from mlxlm.generation.options import GenerationOptions
from mlxlm.utils.errors import ConfigError, GenerationError
from mlxlm.utils.json_files import read_json_object, write_json

FILE_NAME = "generation_config.json"
MAX_EXAMPLE_LENGTH = 200  # characters
_MAX_BYTES = 1 << 20
# The fields of Hugging Face's GenerationConfig that mean the same here, and that every text can use.
_FIELDS = [name for name, field in options_of(GenerationOptions).items() if declaration(field).generation_config]


@dataclass(frozen=True)
class GenerationConfig:
    """What a model's folder says about generating with it.

    Attributes:
        options: The fields of GenerationOptions that it sets. They are defaults: arguments override them.
        example_prompt: A message, or the beginning of a text, that shows what the model can do. This key of the file
            is mlxlm's own.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    example_prompt: str | None = None

    def write(self, folder: Path) -> None:
        """Add these values to the file in `folder`, or create it. Raise as `read` does, and CheckpointError."""
        file = folder / FILE_NAME
        values = read_json_object(file, _MAX_BYTES, ConfigError) if file.exists() else {}
        values.pop("_from_model_config", None)  # with it, transformers ignores what config.json doesn't say
        if "temperature" in self.options:
            values["do_sample"] = self.options["temperature"] > 0
        if check_example_prompt(self.example_prompt) is not None:
            values["example_prompt"] = self.example_prompt
        write_json(file, {**values, **self.options})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file in `folder`, if there is one.

        Raises:
            ConfigError: The file can't be read, or has an invalid value; the message names the file and the field.
        """
        file = folder / FILE_NAME
        return cls.parse(read_json_object(file, _MAX_BYTES, ConfigError), str(file)) if file.exists() else cls()

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Read the values of such a file; `source` is its name for the errors, which are those of `read`."""
        options = {name: values[name] for name in _FIELDS if values.get(name) is not None}
        if values.get("do_sample") is False:  # greedy; then transformers ignores the other options of sampling
            options = {"temperature": 0.0, **{k: v for k, v in options.items() if k not in options_of(FilterOptions)}}
        try:
            GenerationOptions(**options)
            example = check_example_prompt(values.get("example_prompt"))
        except GenerationError as error:
            raise error.prefixed(source, ConfigError) from None
        return cls(options, example)


def check_example_prompt(text: Any) -> str | None:
    """Return the example prompt of a generation_config.json.

    Raises:
        GenerationError: It is not one line of printable text, or too long.
    """
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip() or not text.isprintable() or len(text) > MAX_EXAMPLE_LENGTH:
        hint = f"one line of at most {MAX_EXAMPLE_LENGTH} printable characters"
        raise GenerationError(f"example_prompt is {text!r:.60}", hint)
    return text
