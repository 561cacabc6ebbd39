"""Markdown as coloured lines of a given width. Nothing of a text is left out, whatever it is."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from markdown_it import MarkdownIt
from markdown_it.rules_inline import emphasis
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table, box
from rich.text import Text

from mlxlm.chat.terminal.output import colors_disabled, printable

# HTML is shown, not dropped. Without references and underlined headings no block depends on one that comes later:
# what has been shown stays right. (A line of dashes below a text is a rule then, as models mean it.)
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["reference", "lheading", "html_block", "html_inline"])


def _stars(state, silent: bool) -> bool:
    return state.src[state.pos] == "*" and emphasis.tokenize(state, silent)


_PARSER.inline.ruler.at("emphasis", _stars)  # __init__ and snake_case are names; models emphasise with stars
_STYLES = {
    "strong": "bold", "em": "italic", "s": "strike", "code_inline": "cyan", "link": "underline", "image": "underline",
    "h1": "bold underline", "h2": "bold", "h3": "bold italic", "h4": "italic", "h5": "italic", "h6": "italic",
}  # fmt: skip
_NARROWEST = 8  # columns; what is nested deeper than the window is wide goes on at this width
# What may become a block's mark: of a fence, a heading, a list, a quote, a rule, a table's second row.
_OPENING = re.compile(r"[ ]{0,3}([`~]{1,3}|#{1,6}|[-*+]|\d{1,9}[.)]?|>|[|:-][|: -]*)[ ]*")
_LONE_STAR = re.compile(r"(?<!\S)\*(?!\S)")


@lru_cache(maxsize=8)  # a frame asks several times about the same text
def _parsed(text: str) -> Sequence[Token]:
    return _PARSER.parse(text)


def block_starts(text: str) -> list[int]:
    """The lines on which the outermost blocks of `text` begin. Lines to come can change the last block only."""
    tokens = _parsed(text)
    return [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]


def has_table(text: str) -> bool:
    """Whether there is a table, whose columns change with every row."""
    return any(token.type == "table_open" for token in _parsed(text))


def close_open_markup(text: str) -> str:
    """An unfinished `text` as it probably will look: half a mark isn't shown, and open emphasis is closed."""
    before, _, line = text.rpartition("\n")
    last = next(iter(_parsed(text)[-1:]), None)
    if last is not None and last.type in ("fence", "code_block"):
        return before if re.fullmatch(r"[ ]{0,3}[`~]{1,3}", line) else text
    if _OPENING.fullmatch(line):
        return before
    if line.rstrip("`").count("`") % 2:
        return text.rstrip("`") + "`"
    body = line.rstrip("*")
    typed = len(line) - len(body)
    body = _LONE_STAR.sub("", body)
    wanted = body.count("**") % 2 * 2 + body.replace("**", "").count("*") % 2
    return text[: len(text) - typed].rstrip(" `" if wanted else "`") + "*" * wanted


def is_open(text: str) -> bool:
    """Whether lines to come may close emphasis or a code span of the last paragraph, or make its last backslash a line
    break."""
    last = next(iter(_parsed(text)[-1:]), None)
    if last is None or last.type in ("fence", "code_block"):
        return False
    if text.rstrip().endswith("\\"):
        return True
    line = " ".join(text.rpartition("\n\n")[2].split()) + "x"
    return close_open_markup(line) != line


def trim_beginning(text: str, cut: int, number: int | None = None) -> tuple[str, int, int | None] | None:
    """A shorter source of the same last lines as `text`, one block whose lines before its character `cut` aren't needed
    any more; with where `cut` is in it and the number of its first item, if it is a numbered list, as `number` is that
    of `text` where that isn't what it says.

    That is an open fence with what follows `cut`, or a list from the item around `cut` on; None for anything else.
    """
    block = next(iter(_parsed(text)), None)
    if len(block_starts(text)) != 1 or block.type not in ("fence", "bullet_list_open", "ordered_list_open"):
        return None
    starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
    if block.type == "fence":
        first = text[starts[block.map[0]] : starts[block.map[0] + 1]]
        end = len(text[:cut].rstrip("\n"))  # empty lines are seen once another one follows
        inside = starts[block.map[0] + 1] < end and cut < starts[block.map[1] - 1]
        return (first + text[end + 1 :], len(first) - 1, None) if inside else None
    items = [token.map[0] for token in _parsed(text) if token.type == "list_item_open" and token.level == 1]
    item = max((i for i, line in enumerate(items) if starts[line] <= cut), default=0)
    if not item:
        return None
    start = starts[items[item]]
    first = int(block.attrs.get("start", 1)) if number is None else number
    return text[start:], cut - start, first + item if block.type == "ordered_list_open" else None


class Renderer:
    """Renders Markdown for a terminal of `columns`."""

    def __init__(self, columns: int):
        self.columns = columns
        # The terminal's own sixteen colours: they suit its background.
        colours = None if colors_disabled() else "standard"
        self._console = Console(
            file=io.StringIO(), force_terminal=True, width=columns, color_system=colours, highlight=False,
            markup=False, emoji=False, legacy_windows=False,
        )  # fmt: skip
        light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
        self._theme = "ansi_light" if light else "ansi_dark"

    def lines(self, text: str, number: int | None = None) -> list[str]:
        """The lines of `text`, with colours, no wider than the terminal, without spaces at their ends. `number`: what
        a numbered list that it begins with begins with."""
        self._source, self._number = text.split("\n"), number
        blocks = SyntaxTreeNode(_parsed(text)).children
        found = self._blocks(blocks, self.columns, outermost=True)
        for line in found:
            line.rstrip()
        found = [part for line in found for part in line.divide(_cuts(line.plain, self.columns))]
        whole = Text("\n").join([*found, Text()])
        with self._console.capture() as capture:
            self._console.print(whole, end="", no_wrap=True, overflow="ignore", crop=False)
        return capture.get().split("\n")[:-1]

    def _blocks(self, nodes: list[SyntaxTreeNode], width: int, outermost: bool = False) -> list[Text]:
        """The lines of blocks one below the other: apart by an empty line, inside of others only where the text is."""
        lines: list[Text] = []
        for node in nodes:
            if lines and (outermost or self._is_apart(node)):
                lines.append(Text())
            lines += self._block(node, width)
        return lines

    def _is_apart(self, node: SyntaxTreeNode) -> bool:
        return node.map is not None and not self._source[node.map[0] - 1].strip(" \t>")

    def _block(self, node: SyntaxTreeNode, width: int) -> list[Text]:
        if node.type in ("fence", "code_block"):
            return self._code(node, width)
        if node.type in ("bullet_list", "ordered_list"):
            return list(self._list(node, width))
        if node.type == "blockquote":
            return [Text.assemble(("│ ", "dim"), line) for line in self._blocks(node.children, width - 2)]
        if node.type == "table":
            return self._table(node, width)
        if node.type == "hr":
            return [Text("─" * width, "dim")]
        text = Text()
        for child in node.children:
            text += self._inline(child)
        if node.type == "heading":
            text.stylize_before(_STYLES[node.tag])
        return self._wrapped(text, width)

    def _wrapped(self, text: Text, width: int) -> list[Text]:
        return list(text.wrap(self._console, max(width, _NARROWEST), overflow="fold", tab_size=4))

    def _code(self, node: SyntaxTreeNode, width: int) -> list[Text]:
        """Code between its fences, so that it is told from text without colours, and begins where the line does."""
        code, language = printable(node.content).rstrip("\n").expandtabs(4), printable(node.info).strip()
        name = language.split()[0] if language else "text"
        coloured = Syntax("", name, theme=self._theme, background_color="default").highlight(code)
        coloured.rstrip()
        lines = list(coloured.split("\n", allow_blank=True)) if coloured else []
        if node.type == "fence":
            last = self._source[node.map[1] - 1].strip(" \t>")
            is_closed = node.map[1] - node.map[0] > 1 and last and not last.strip(node.markup[0])
            lines = [Text(f"```{language}", "dim"), *lines, *([Text("```", "dim")] if is_closed else [])]
        return [part for line in lines for part in line.divide(_cuts(line.plain, max(width, _NARROWEST)))]

    def _list(self, node: SyntaxTreeNode, width: int) -> Iterator[Text]:
        number = int(node.attrs.get("start", 1)) if self._number is None else self._number
        self._number = None
        for i, item in enumerate(node.children):
            mark = "• " if node.type == "bullet_list" else f"{number + i}. "
            if i and self._is_apart(item):
                yield Text()
            lines = self._blocks(item.children, width - len(mark))
            for j, line in enumerate(lines or [Text()]):
                yield Text.assemble(" " * len(mark) if j else (mark, "bold"), line)

    def _table(self, node: SyntaxTreeNode, width: int) -> list[Text]:
        rows = [[self._cell(cell) for cell in row.children] for part in node.children for row in part.children]
        headings = node.children[0].children[0].children
        sides = [str(cell.attrs.get("style", "")).removeprefix("text-align:") for cell in headings]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", border_style="dim")
        for heading, side in zip(rows[0], sides, strict=True):
            table.add_column(heading, justify=side or "left", overflow="fold")
        for row in rows[1:]:
            table.add_row(*row)
        options = self._console.options.update(width=max(width, _NARROWEST), height=None)
        lines = self._console.render_lines(table, options, pad=False)
        found = [Text.assemble(*((piece.text, piece.style or "") for piece in line)) for line in lines]
        return found

    def _cell(self, cell: SyntaxTreeNode) -> Text:
        text = Text()
        for child in cell.children:
            text += self._inline(child)
        return text

    def _inline(self, node: SyntaxTreeNode) -> Text:
        if node.type in ("softbreak", "hardbreak"):
            return Text("\n")  # models that break lines (poems, addresses) mean it
        text = Text()
        if not node.children or node.type == "image":
            text.append(printable(node.content))
        else:
            for child in node.children:
                text += self._inline(child)
        if node.type in _STYLES:
            text.stylize_before(_STYLES[node.type])
        if node.type in ("link", "image"):  # where it leads is shown: a terminal's own links hide it
            target = printable(str(node.attrs.get("href" if node.type == "link" else "src", "")))
            if target and target not in (text.plain, f"mailto:{text.plain}"):
                text.append(f" ({target})", "dim")
        return text


def _cuts(text: str, width: int) -> list[int]:
    """Where to cut `text` into pieces of at most `width` columns."""
    cuts, used = [], 0
    for i, character in enumerate(text):
        cells = cell_len(character)
        if used + cells > width:
            cuts.append(i)
            used = 0
        used += cells
    return cuts
