"""The clipboard: the system's own program or, over SSH and without one, the terminal's escape sequence OSC 52."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys

from mlxlm.chat.terminal.output import is_dumb_terminal
from mlxlm.utils.errors import GenerationError

_SECONDS = 5


def copy(text: str) -> str:
    """Copy a text, and return how: "with xclip", for example.

    Raises:
        GenerationError: There is neither a program nor a terminal, or the program failed.
    """
    if (command := _command()) is not None:
        try:
            subprocess.run(command, input=text.encode(), check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise GenerationError(f"{command[0]} failed: {error}", "/export FILE.md") from None
        return f"with {command[0]}"
    if not sys.stdout.isatty() or is_dumb_terminal():
        raise GenerationError("there is no clipboard here", "pbcopy, wl-copy or xclip, or a terminal")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
    sys.stdout.flush()
    return "through the terminal (OSC 52)"


def _command() -> list[str] | None:
    if "SSH_CONNECTION" in os.environ:  # their clipboard would be that of another machine
        return None
    candidates = [
        (sys.platform == "darwin", ["pbcopy"]),
        ("WAYLAND_DISPLAY" in os.environ, ["wl-copy"]),
        ("DISPLAY" in os.environ, ["xclip", "-selection", "clipboard"]),
    ]
    return next((command for usable, command in candidates if usable and shutil.which(command[0])), None)
