"""Files in a message: read as text, put in front of what the user says, and found again there."""

from __future__ import annotations

import codecs
import io
import logging
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path

from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import GenerationError

MAX_BYTES = 32 << 20  # of a file; a text of this size has millions of tokens
_PDF_HEADER_BYTES = 1024  # the signature %PDF- must be within these
_MEDIA = {"image": "an image", "audio": "a sound", "video": "a video"}
_HTML = {"text/html", "application/xhtml+xml"}
_BLOCK = re.compile(r"File: (?P<name>[^\n]+)\n(?P<fence>`{3,})\n(?P<text>.*?)\n(?P=fence)(?:\n\n|\Z)", re.DOTALL)


class FileError(GenerationError):
    """A file can't be part of a message."""


@dataclass(frozen=True)
class TextFile:
    """The text of a file.

    Attributes:
        name: What the model sees as its name.
        text: Its text, with line feeds as line ends.
    """

    name: str
    text: str

    @property
    def block(self) -> str:
        """The file in a message: its name and its text, in a fence longer than any inside."""
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))
        return f"File: {self.name}\n{fence}\n{self.text}\n{fence}"


def with_files(message: str, files: Sequence[TextFile]) -> str:
    """Return a message with files in front of it. Small models answer best what comes last."""
    return "\n\n".join(filter(None, [*(file.block for file in files), message]))


def split_files(message: str) -> tuple[list[TextFile], str]:
    """Return the files that `with_files` has put in front of a message, and the message."""
    files, start = [], 0
    while match := _BLOCK.match(message, start):
        files.append(TextFile(match["name"], match["text"]))
        start = match.end()
    return files, message[start:]


def name_files(message: str) -> str:
    """Return a message as a list shows it: with the names of its files instead of their text."""
    files, text = split_files(message)
    return " ".join([*(f"[{file.name}]" for file in files), text])


def shown_name(path: Path) -> str:
    """Return what the model sees as the name of a file: a relative path, or the last part of another."""
    return path.name if path.is_absolute() else str(path)


def read_file(path: Path | str) -> TextFile:
    """Read a file as text: plain text of any kind, HTML without its markup, or the text of a PDF if there is pypdf.

    Args:
        path: The file.

    Raises:
        FileError: The file can't be read, is empty, has more than `MAX_BYTES`, or isn't text in UTF-8 or UTF-16.
    """
    path = Path(path)
    if path.is_dir():
        names = sorted(child.name for child in islice(path.iterdir(), 1000) if child.is_file())
        raise FileError(f"{path} is a folder", f"one of its files: {', '.join(names[:10])}" if names else "a file")
    return TextFile(shown_name(path), text_of(read_bytes(path, MAX_BYTES, FileError), str(path)))


def text_of(content: bytes, name: str) -> str:
    """Return the text of a file, with line feeds as line ends.

    Args:
        content: The file.
        name: Its name, whose ending tells HTML from other text, and which errors begin with.

    Raises:
        FileError: As `read_file`.
    """
    kind = mimetypes.guess_type(name)[0] or ""
    hint = None
    if b"%PDF-" in content[:_PDF_HEADER_BYTES]:
        text, hint = _pdf_text(content, name), "a PDF whose pages aren't pictures of text"
    else:
        text = _decode(content, kind, name)
        text = _html_text(text, name) if kind in _HTML else text
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    if not text.strip():
        raise FileError(f"{name} has no text", hint)
    return text


def _decode(content: bytes, kind: str, name: str) -> str:
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16") if is_utf16 else None
    except UnicodeDecodeError:
        text = "\0"
    medium = "text" if kind == "image/svg+xml" else kind.partition("/")[0]
    if text is None and b"\0" not in content and medium not in _MEDIA:
        hint = f"the same file in UTF-8: iconv -f LATIN1 -t UTF-8 {Path(name).name}"
        return decode_utf8(content, name, FileError, hint, "utf-8-sig")
    if text is None or "\0" in text:
        what = _MEDIA.get(medium, "a binary file")
        raise FileError(f"{name} is {what}, not text", "text, source code, HTML or PDF")
    return text


def _pdf_text(content: bytes, name: str) -> str:
    try:
        import pypdf
    except ImportError:
        raise FileError(f"{name} is a PDF, which needs pypdf", "pip install pypdf") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns about details of a file that it can read
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages]
    except Exception as error:  # malformed files lead to errors of many kinds
        raise FileError(f"cannot read {name}: {error}", "the same text in another format") from error
    text = "\n\n".join(page.strip() for page in pages)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # some PDFs have halves of characters


def _html_text(html: str, name: str) -> str:
    parser = _HtmlText()
    try:
        parser.feed(html)
        parser.close()
    except AssertionError:  # of html.parser, for a malformed declaration
        raise FileError(f"{name} is not HTML", "the same file with the ending .txt") from None
    return parser.text


class _HtmlText(HTMLParser):
    """Collects what a browser shows: a line for each block, "- " before items, tabs between cells."""

    _HIDDEN = frozenset({"script", "style", "template", "svg"})
    _LINES = frozenset({"br", "div", "dd", "dt", "figcaption", "hr", "option", "tr"})
    _PARAGRAPHS = frozenset({"article", "blockquote", "form", "header", "main", "ol", "p", "pre", "section", "table"})
    _PARAGRAPHS |= {"aside", "dl", "figure", "footer", "nav", "title", "ul"}

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._hidden = self._preformatted = 0

    @property
    def text(self) -> str:
        lines = re.sub(r"[ \t]+\n", "\n", "".join(self._parts))
        return re.sub(r"\n{3,}", "\n\n", lines).strip()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        self._preformatted += tag == "pre"
        self._break(tag)
        if tag == "li":
            self._parts.append("\n- ")
        elif re.fullmatch("h[1-6]", tag):
            self._parts.append(f"\n\n{'#' * int(tag[1])} ")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))
        self._preformatted = max(0, self._preformatted - (tag == "pre"))
        self._break(tag)
        if tag in ("td", "th"):
            self._parts.append("\t")
        elif re.fullmatch("h[1-6]", tag):
            self._parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._preformatted:
            data = re.sub(r"\s+", " ", data)
            if not self._parts or self._parts[-1][-1:] in ("", " ", "\n", "\t"):
                data = data.lstrip()
        self._parts.append(data)

    def _break(self, tag: str) -> None:
        if tag in self._LINES or tag in self._PARAGRAPHS:
            self._parts.append("\n\n" if tag in self._PARAGRAPHS else "\n")
