"""Packages whose names are imported when they are first used, so that a settings class is there without MLX."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """`__getattr__` of a package, for the names that it imports for type checkers alone (`if TYPE_CHECKING:`).

    Importing MLX, NumPy and the package takes 0.4 s, and the help of a command needs only the options.
    """
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.col_offset]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return __getattr__
