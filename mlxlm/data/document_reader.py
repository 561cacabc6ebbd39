"""Reads documents more than once, also from streams that can be read only once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from mlxlm.data.bad_input import OnBad
from mlxlm.data.sources import STDIN, read_documents
from mlxlm.data.text import READ_BYTES, Advance, Document
from mlxlm.data.tokenize import check_role
from mlxlm.utils.errors import DataError


class DocumentReader:
    """Reads the documents of sources; stdin and named pipes can be read again after `spool_streams`."""

    def __init__(self, stdin: IO[bytes] | None, text_column: str | None):
        self._stdin, self._text_column = stdin, text_column
        self._is_spooled = False

    def __call__(
        self, paths: Sequence[str | Path], on_bad: OnBad, advance: Advance | None = None
    ) -> Iterator[Document]:
        """Yield documents as `read_documents` does. Conversations with an unknown role are bad input."""
        if self._is_spooled:
            self._stdin.seek(0)
        documents = read_documents(
            paths, stdin=self._stdin, advance=advance, text_column=self._text_column, on_bad=on_bad
        )
        for document in documents:
            try:
                for role, _ in document.messages or ():
                    check_role(role, document.location)
            except DataError as error:
                on_bad(error)
            else:
                yield document

    def spool_streams(self, paths: Sequence[str | Path], folder: Path, stack: ExitStack) -> list[str | Path]:
        """Copy stdin and named pipes into `folder`, until `stack` is closed; returns the paths to read instead."""
        spooled: list[str | Path] = []
        for path in paths:
            if str(path) == STDIN and self._stdin is not None and not self._is_spooled:
                copy = stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
                shutil.copyfileobj(self._stdin, copy, READ_BYTES)
                self._stdin, self._is_spooled = copy, True
            elif Path(path).is_fifo():
                copy = Path(stack.enter_context(TemporaryDirectory(dir=folder)), Path(path).name)
                with open(path, "rb") as pipe, open(copy, "wb") as file:
                    shutil.copyfileobj(pipe, file, READ_BYTES)
                path = copy
            spooled.append(path)
        return spooled
