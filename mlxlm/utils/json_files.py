"""Read JSON files of untrusted size and content."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import ConfigError

_LARGEST_JSON = 4 << 20  # bytes, which take 20 times that when read; plans for thousands of layers have 1 MB


def read_json(path: Path | str) -> Any:
    """The JSON value in a file, or in `config.json` of a folder. Raises ConfigError naming the file."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not os.path.exists(path):
        raise ConfigError(f"{path} does not exist", "the folder of a model or of a run")
    try:
        return json.loads(read_bytes(path, _LARGEST_JSON, ConfigError).decode("utf-8-sig"))  # Windows puts a mark first
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
