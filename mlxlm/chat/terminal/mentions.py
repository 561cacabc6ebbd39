r"""Files that a message mentions: @notes.txt, @~/notes.txt, @my\ notes.txt or @"my notes.txt"."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxlm.chat.files import shown_name

_BARE = r"(?:\\.|[^\s\\])"
_MENTION = re.compile(rf"""(?<!\S)@(?:"(?P<double>[^"\n]+)"|'(?P<single>[^'\n]+)'|(?P<bare>{_BARE}+))""")
UNFINISHED_MENTION = re.compile(rf"(?<!\S)@(?P<bare>{_BARE}*)\Z")
_PUNCTUATION = ".,;:!?)]}'\""


def mentioned_paths(text: str) -> tuple[str, list[Path]]:
    """Return a message with names instead of mentions, and the files. A mention of anything else stays text."""
    paths: list[Path] = []

    def name(match: re.Match[str]) -> str:
        typed = match["double"] or match["single"] or unescape(match["bare"])
        bare = typed if match["bare"] is None else typed.rstrip(_PUNCTUATION)
        for candidate in dict.fromkeys((typed, bare)):
            if os.path.isfile(path := os.path.expanduser(candidate)):
                paths.append(Path(path))
                return shown_name(Path(path)) + typed[len(candidate) :]
        return match[0]

    return _MENTION.sub(name, text), paths


def unescape(path: str) -> str:
    r"""Return a path without the backslashes of a shell: a\ b is "a b"."""
    return re.sub(r"\\(.)", r"\1", path)
