"""Markdown rendered by rich: finished blocks are printed once, the last one is redrawn while it grows."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, emphasis
from markdown_it.token import Token
from rich import box, markdown
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from mlxlm.chat.terminal.output import colors_disabled
from mlxlm.utils.formatting import printable

_FRAME_SECONDS = 1 / 30
_DRAWING_SHARE = 0.1  # of the time: drawing takes it from generation
_MIN_COLUMNS = 8
# An unfinished last line that may become a fence, a heading, a list item, a quote, a rule or a table's second row.
_BLOCK_MARKER = re.compile(r"[ ]{0,3}([`~]{1,3}|#{1,6}|[-*+]|\d{1,9}[.)]?|>|[|:-][|: -]*)[ ]*")
_SGR = re.compile(r"\x1b\[[0-9;]*m")
# One write per frame. Terminals with synchronized updates (mode 2026) show it at once, others ignore the mode. Without
# autowrap (mode 7) a character that the terminal draws wider than rich expects can't shift the rows below it.
_BEGIN, _END = "\x1b[?2026h\x1b[?7l", "\x1b[?7h\x1b[?2026l"
_THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold italic",
        "markdown.hr": "dim",
        "markdown.table.header": "bold",
        "markdown.u": "underline",
        "markdown.table.border": "dim",
        "markdown.block_quote": "none",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
    }
)


def _star_emphasis(state: StateInline, silent: bool) -> bool:
    return state.src[state.pos] == "*" and emphasis.tokenize(state, silent)


# HTML is shown as text. Without references and underlined headings no block depends on a later one, so finished blocks
# never change. Only stars emphasize: __init__ and snake_case are names.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["reference", "lheading", "html_block", "html_inline"])
_PARSER.inline.ruler.at("emphasis", _star_emphasis)


class _CodeBlock(markdown.CodeBlock):
    """Highlighted code between its fences, which starts in the first column."""

    fence: Text | None = None

    @classmethod
    def create(cls, document: markdown.Markdown, token: Token) -> _CodeBlock:
        block = cls(token.info.partition(" ")[0] or "text", document.code_theme)
        if token.markup:
            block.fence = Text(f"```{token.info}", "dim")
        return block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        if self.fence:
            yield self.fence
        if code:
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
        if self.fence:
            yield Text("```", "dim")


class _Heading(markdown.Heading):
    LEVEL_ALIGN = {}  # all on the left


class _HorizontalRule(markdown.HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")


class _ListItem(markdown.ListItem):
    """A list item whose number keeps its dot."""

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        label = f"{number}. ".rjust(len(f"{last_number - 1}. ") + 1)
        lines = console.render_lines(self.elements, options.update(width=options.max_width - len(label)))
        for i, line in enumerate(lines):
            yield Segment(" " * len(label) if i else label, console.get_style("markdown.item.number"))
            yield from line
            yield Segment.line()


class _TableElement(markdown.TableElement):
    """A table whose cells wrap instead of being cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, border_style="markdown.table.border")
        for cell in self.header.row.cells if self.header and self.header.row else ():
            table.add_column(cell.content, cell.content, justify=cell.justify, overflow="fold")
        for row in self.body.rows if self.body else ():
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class _Markdown(markdown.Markdown):
    elements = markdown.Markdown.elements | {
        "code_block": _CodeBlock,
        "fence": _CodeBlock,
        "heading_open": _Heading,
        "hr": _HorizontalRule,
        "list_item_open": _ListItem,
        "table_open": _TableElement,
    }

    inlines = markdown.Markdown.inlines | {"u"}

    def __init__(self, source: str, code_theme: str):
        super().__init__("", code_theme=code_theme)
        self.parsed = [_displayed(token) for token in _PARSER.parse(source)]


def _displayed(token: Token) -> Token:
    """Replace control characters in a token, keep its line ends, and show where its links lead."""
    children: list[Token] = []
    for child in token.children or ():
        content = printable(child.content)
        if child.type == "softbreak":  # models that break lines (poems, addresses) mean it
            children.append(replace(child, type="hardbreak"))
        elif child.type == "link_open":
            target = printable(str(child.attrs.get("href", "")))
            children.append(replace(child, type="u_open", tag="u"))
        elif child.type == "link_close":
            text = children[-1].content
            children.append(replace(child, type="u_close", tag="u"))
            if target not in ("", text, f"mailto:{text}"):
                children.append(Token("text", "", 0, content=f" ({target})"))
        elif child.type == "image":
            source = printable(str(child.attrs.get("src", "")))
            children.append(Token("text", "", 0, content=f"{content} ({source})"))
        else:
            children.append(replace(child, content=content))
    content, info = printable(token.content), printable(token.info)
    return replace(token, content=content, info=info, children=children or None)


def block_starts(text: str) -> list[int]:
    """Return the line numbers on which the top-level blocks of `text` start. New lines change only the last block."""
    return [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.nesting >= 0 and token.map]


def _fits(source: str, columns: int) -> bool:
    """Whether nested lists and quotes, and the columns of a table, leave room for text."""
    indents = {"bullet_list": 3, "ordered_list": 12, "blockquote": 4}
    indent = cells = 0
    for token in _PARSER.parse(source):
        indent += token.nesting * indents.get(token.type.rpartition("_")[0], 0)
        cells = 0 if token.type == "tr_open" else cells + (token.type in ("th_open", "td_open"))
        if indent + max(_MIN_COLUMNS, 4 * cells) > columns:
            return False
    return True


class Renderer:
    """Renders Markdown as lines for a terminal with `columns`."""

    def __init__(self, columns: int):
        self.columns = columns
        # The sixteen colors of the terminal's own palette suit its background.
        self._colors = None if colors_disabled() else ColorSystem.STANDARD
        self._console = Console(file=io.StringIO(), force_terminal=True, width=max(columns, 1), theme=_THEME)
        light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
        self._code_theme = "ansi_light" if light else "ansi_dark"

    def lines(self, source: str) -> list[str]:
        """Return the lines of one block with SGR sequences, without trailing spaces."""
        fits = _fits(source, self.columns)
        # The source itself loses nothing.
        content = _Markdown(source, self._code_theme) if fits else Text(printable(source), overflow="fold")
        lines = [self._encode(line) for line in self._console.render_lines(content, pad=False)]
        filled = [i for i, line in enumerate(lines) if line]
        return lines[filled[0] : filled[-1] + 1] if filled else []

    def _encode(self, line: list[Segment]) -> str:
        """Return a line as text with SGR sequences, without trailing spaces."""
        while line and not line[-1].text.rstrip():
            line = line[:-1]
        if line:
            line = [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)]
        return "".join(style.render(text, color_system=self._colors) if style else text for text, style, _ in line)


class LiveTail:
    """Lines at the cursor that can be redrawn; everything above them stays.

    A line has SGR sequences, no other control characters, and at most the terminal's width. The cursor is behind the
    last line of the tail, or at the start of a line if there is none.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]):
        """`write` writes and flushes a string; `size` returns the terminal's columns and rows."""
        self._write, self.size = write, size
        self._lines: list[str] = []

    def draw(self, lines: Sequence[str], final: Sequence[str] = ()) -> None:
        """Print `final` in place of the tail, then draw `lines` below it as the new tail."""
        lines, final = list(lines), list(final)
        if lines == self._lines and not final:
            return
        columns, _ = self.size()
        # After a resize, terminals wrap lines that have become too long.
        drawn = [max(1, -(-cell_len(_SGR.sub("", line)) // max(columns, 1))) for line in self._lines]
        old, new = self._lines, final + lines
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if old and same == len(old):  # only add lines
            out = "\r\n" if len(new) > same else ""
        elif old:
            same = max(0, min(same, len(new) - 1))
            up = sum(drawn[same:]) - 1  # terminals stop at their first row
            out = "\r" + (f"\x1b[{up}A" if up > 0 else "") + "\x1b[J"
        else:
            out = ""
        out += "\r\n".join(new[same:]) + ("\r\n" if final and not lines else "")
        self._lines = lines
        self._write(_BEGIN + out + _END)


class MarkdownStream:
    """Shows one Markdown text that arrives in pieces.

    Finished blocks are printed. The last block is redrawn in place; when it grows higher than the screen, its first
    lines are printed as they are and scroll off. Only a table is shown from its end until it is finished, since each
    row can change its column widths.
    """

    def __init__(self, tail: LiveTail, clock: Callable[[], float] = time.perf_counter):
        """Use `tail` for the last block; `clock` returns seconds."""
        self._tail, self._clock = tail, clock
        self._renderer = Renderer(tail.size()[0])
        self._source = ""  # of the last block
        self._printed = 0  # lines of the last block
        self._is_first_block = True
        self._next_frame = 0.0

    def push(self, text: str) -> None:
        """Add text. It is drawn now, or with a later piece."""
        self._source += printable(text.replace("\r", ""))
        start = self._clock()
        if start >= self._next_frame:
            self._draw()
            end = self._clock()
            self._next_frame = end + max(_FRAME_SECONDS, (end - start) / _DRAWING_SHARE)

    def finish(self) -> None:
        """Print the rest. The cursor is then at the start of a line."""
        self._tail.draw([], self._finish_blocks(len(self._source.split("\n"))))

    def _draw(self) -> None:
        columns, rows = self._tail.size()
        if columns != self._renderer.columns:
            self._renderer = Renderer(columns)
            self._printed = min(self._printed, len(self._lines(self._source)))
        # An unfinished line may still turn out to belong to the block above it.
        complete, _, last_line = self._source.rpartition("\n")
        final = self._finish_blocks(max(block_starts(complete + "\n"), default=0))
        visible = self._source.removesuffix(last_line) if _BLOCK_MARKER.fullmatch(last_line) else self._source
        lines = self._lines(visible)[self._printed :]
        overflow = len(lines) - max(rows - 1, 1)
        if overflow > 0:
            if not any(token.type == "table_open" for token in _PARSER.parse(self._source)):
                final += lines[:overflow]
                self._printed += overflow
            lines = lines[overflow:]
        self._tail.draw(lines, final)

    def _lines(self, block: str) -> list[str]:
        lines = self._renderer.lines(block)
        return lines if self._is_first_block or not lines else ["", *lines]

    def _finish_blocks(self, end: int) -> list[str]:
        """Remove the blocks above line `end` from the source; return their lines that are not printed yet."""
        source_lines = self._source.split("\n")
        starts = [start for start in block_starts(self._source) if start < end]
        final: list[str] = []
        for start, stop in zip(starts, [*starts[1:], end], strict=False):
            final += self._lines("\n".join(source_lines[start:stop]))[self._printed :]
            self._is_first_block, self._printed = False, 0
        if starts:
            self._source = "\n".join(source_lines[end:])
        return final
