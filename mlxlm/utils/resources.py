"""Paths of `metal_kernels/` and `models/`: next to the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from mlxlm.utils.errors import PlatformError

_PACKAGE = Path(__file__).resolve().parents[1]


def resource(*parts: str) -> Path:
    """The path of a file or folder that ships with mlxlm, such as `resource("models", "presets")`.

    Raises:
        PlatformError: This installation lacks it.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise PlatformError(f"this installation lacks {'/'.join(parts)}", "reinstall mlxlm")
