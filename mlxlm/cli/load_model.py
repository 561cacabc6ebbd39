"""Loads the model of a command, and shows that it does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mlxlm.cli.spinner import spinner
from mlxlm.utils.errors import one_line

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel


def load_model(model: str) -> LoadedModel:
    """Load a model by path or hub id, with a spinner.

    A path is made absolute, because sessions and caches store it and may be used from another folder.
    """
    from mlxlm.generation import load

    with spinner(f"loading {one_line(model)}"):
        return load(os.path.abspath(model) if os.path.exists(model) else model)
