"""What is piped into a command that has a prompt: `cat notes.txt | mlxlm chat MODEL -p "Summarize"`."""

from __future__ import annotations

import os
import re
import select
import stat
import sys

from mlxlm.cli.spinner import spinner
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import GenerationError

# A program that starts this one may leave it a pipe in which nothing ever comes. Other programs of a pipeline may take
# long before they write: so this is waited for their first byte, but only once the model is loaded.
FIRST_BYTE_SECONDS = 10


def read_stdin() -> str:
    """All of standard input, less a byte order mark and one line end at its end; "" where it is closed. Raises
    GenerationError for what is not UTF-8."""
    content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    text = decode_utf8(content, "standard input", GenerationError, "a text file in UTF-8", "utf-8-sig")
    return re.sub(r"\r?\n\Z", "", text)


def prepend_stdin(prompt: str) -> str:
    """`prompt` below what is piped in, with an empty line between; `prompt` where nothing is.

    Files, pipes and sockets are read, neither terminals nor other devices. Raises as `read_stdin` does.
    """
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        with spinner("waiting for standard input"):
            ready, _, _ = select.select([0], [], [], FIRST_BYTE_SECONDS)
        if not ready:
            print(
                f"warning: nothing came from standard input in {FIRST_BYTE_SECONDS} seconds, so the prompt is used "
                "alone (try: < /dev/null, or --prompt - to wait for a prompt)",
                file=sys.stderr,
            )
            return prompt
    elif not stat.S_ISREG(mode):
        return prompt
    piped = read_stdin()
    return f"{piped}\n\n{prompt}" if piped and prompt else piped or prompt
