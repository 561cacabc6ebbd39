"""Finds `metal_kernels/` and `models/`: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from mlxlm.utils.errors import PlatformError

_PACKAGE = Path(__file__).resolve().parents[1]


def resource(*parts: str) -> Path:
    """The path of a file or folder that ships with mlxlm, e.g. `resource("models", "presets")`.

    Raises PlatformError if this installation lacks it.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise PlatformError(f"this installation lacks {'/'.join(parts)}", "reinstall mlxlm")
