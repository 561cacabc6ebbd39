"""Reads standard input as a prompt, or as a part of it: `cat notes.txt | mlxlm chat MODEL -p "Summarize"`."""

from __future__ import annotations

import os
import re
import select
import stat
import sys

from mlxlm.cli.render import spinner
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import GenerationError

# How long to wait for the first byte, after the model is loaded. A parent process may leave a pipe open in which
# nothing ever comes; other programs of a pipeline may take long before they write.
FIRST_BYTE_SECONDS = 10


def read_stdin() -> str:
    """Read all of standard input, without a byte order mark and the last line end; "" if it is closed.

    Raises GenerationError if it is not UTF-8.
    """
    content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    text = decode_utf8(content, "standard input", GenerationError, "a text file in UTF-8", "utf-8-sig")
    return re.sub(r"\r?\n\Z", "", text)


def prepend_stdin(prompt: str) -> str:
    """Put piped input before the prompt, with an empty line between them.

    Files, pipes and sockets are read, but not terminals and other devices. Raises as `read_stdin` does.
    """
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        with spinner("waiting for standard input"):
            ready, _, _ = select.select([0], [], [], FIRST_BYTE_SECONDS)
        if not ready:
            print(
                f"warning: nothing came from standard input in {FIRST_BYTE_SECONDS} seconds; using the prompt alone "
                "(try: < /dev/null, or --prompt - to wait for standard input)",
                file=sys.stderr,
            )
            return prompt
    elif not stat.S_ISREG(mode):
        return prompt
    piped = read_stdin()
    return f"{piped}\n\n{prompt}" if piped and prompt else piped or prompt
