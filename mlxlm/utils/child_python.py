"""Python in another process: it imports what this process would, and nothing from the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn


def python_command(*arguments: str) -> list[str]:
    """The command that runs Python with these arguments. `-P` keeps the current folder out of the search path."""
    return [sys.executable, "-P", *arguments]


def python_environment() -> dict[str, str]:
    """This process's environment, with its search path, which may have the folder of a checkout."""
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def replace_process(*arguments: str, changes: Mapping[str, str]) -> NoReturn:
    """Run Python with these arguments in place of this process, with these environment variables changed."""
    command = python_command(*arguments)
    os.execve(command[0], command, {**python_environment(), **changes})
