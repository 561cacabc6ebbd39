"""Makes the pictures in docs/images/ by running the program: terminal sessions as SVG, pages and plots as PNG.

    python docs/make_images.py MODEL [--only quickstart chat train quantize report page] [--questions QUESTION ...]

MODEL is for the chats; for the other pictures, models are trained. This needs the extras `dev` and `docs`, Chromium or
Chrome, and about ten minutes on an idle machine: what a model learns in two minutes depends on its speed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pexpect
import pyte
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
FONT_SIZE = 13
COLUMNS, CHAT_COLUMNS, ROWS = 96, 56, 100  # the chat can be read on a phone without scrolling
SHELL_PROMPT, CHAT_PROMPT = re.compile(r"\$ +$"), re.compile(r"\d+% > ")
QUESTIONS = [
    "What is a prime number? One sentence.",
    "A Python function that adds two numbers, please.",
]
COLOR_NAMES = {"default": None, "brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's -> rich's
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # which rich would load from another server


class Screen(pyte.Screen):
    """pyte's screen, which answers queries of the program, and marks dim text, which pyte ignores, as blinking."""

    answer: Callable[[str], None]

    def write_process_input(self, data: str) -> None:
        """Answer a query of the program, such as for the position of the cursor."""
        self.answer(data)

    def select_graphic_rendition(self, *attrs: int, **settings: bool) -> None:
        """Set colors and styles."""
        if not {38, 48} & set(attrs):  # these are followed by a color, which may have a 2
            attrs = tuple(other for attr in attrs for other in {2: (5,), 22: (22, 25)}.get(attr, (attr,)))
        super().select_graphic_rendition(*attrs, **settings)

    def text(self) -> Text:
        """What the screen shows, without the empty lines at its end."""
        lines = [Text() for _ in range(self.lines)]
        for y, line in enumerate(lines):
            for style, chars in groupby((self.buffer[y][x] for x in range(self.columns)), key=_style):
                line.append("".join(char.data for char in chars), style)
            line.rstrip()
        while lines and not lines[-1].plain:
            lines.pop()
        return Text("\n").join(lines)


def _style(char: pyte.screens.Char) -> Style:
    return Style(
        color=_color(char.fg),
        bgcolor=_color(char.bg),
        bold=char.bold,
        italic=char.italics,
        underline=char.underscore,
        strike=char.strikethrough,
        reverse=char.reverse,
        dim=char.blink,
    )


def _color(name: str) -> str | None:
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return COLOR_NAMES.get(name, name.replace("bright", "bright_"))


class Terminal:
    """A shell in a terminal."""

    def __init__(self, folder: Path, columns: int = COLUMNS):
        command = folder / "bin" / "mlxlm"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!{sys.executable}\nfrom mlxlm.cli.main import main\nmain()\n")
        command.chmod(0o755)
        env = os.environ | {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PS1": "$ ",
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self._child = pexpect.spawn(
            "bash --norc --noprofile", cwd=str(folder), env=env, dimensions=(ROWS, columns), encoding="utf-8"
        )
        self.screen = Screen(columns, ROWS)
        self.screen.answer = self._child.send
        self._stream = pyte.Stream(self.screen)
        self.wait(SHELL_PROMPT)

    def wait(self, prompt: re.Pattern[str], seconds: float = 600) -> None:
        """Wait until the cursor is in a line that matches `prompt`, and nothing more comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._stream.feed(self._child.read_nonblocking(1 << 16, timeout=1))
            except pexpect.TIMEOUT:
                if prompt.match(self.screen.display[self.screen.cursor.y]):
                    return
        raise TimeoutError("\n".join(self.screen.display))

    def type(self, line: str, prompt: re.Pattern[str] = SHELL_PROMPT) -> None:
        """Type a line, and wait for the next prompt."""
        self._child.send(line)
        time.sleep(0.5)
        self._child.send("\r")
        self.wait(prompt)
        if any(row.startswith("error: ") for row in self.screen.display):
            raise RuntimeError("\n".join(self.screen.display).rstrip())

    def save(self, name: str, title: str) -> None:
        """Write what the terminal shows as an SVG."""
        console = Console(width=self.screen.columns, record=True, file=io.StringIO(), color_system="truecolor")
        console.print(self.screen.text(), soft_wrap=True)
        svg = WEB_FONT.sub("", console.export_svg(title=title, unique_id=name))
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) * FONT_SIZE / 20  # rich draws it at 20 pixels
        _write(f"{name}.svg", svg.replace("<svg ", f'<svg width="{width:.0f}" ', 1).encode())


def _write(name: str, content: bytes) -> None:
    if len(content) > MAX_BYTES:
        raise ValueError(f"{name} has {len(content)} bytes, more than {MAX_BYTES}")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_bytes(content)
    print(f"{name}: {len(content)} bytes")


def quickstart(setup: argparse.Namespace) -> None:
    """A quickstart without the chat."""
    terminal = Terminal(setup.folder)
    terminal.type("mlxlm quickstart --no-chat")
    terminal.save("quickstart", "mlxlm quickstart")


def chat(setup: argparse.Namespace) -> None:
    """A chat in the terminal."""
    terminal = Terminal(setup.folder, CHAT_COLUMNS)
    terminal.type(f"mlxlm chat {setup.model} --temperature 0", CHAT_PROMPT)
    for question in setup.questions:
        terminal.type(question, CHAT_PROMPT)
    terminal.save("chat", "mlxlm chat")


def train(setup: argparse.Namespace) -> None:
    """A run of two minutes."""
    terminal = Terminal(setup.folder)
    terminal.type("mlxlm prepare --builtin small-world --out stories.jsonl")
    terminal.type("mlxlm pretrain stories.jsonl --minutes 2 --out run")
    terminal.save("train", "mlxlm pretrain")


def quantize(setup: argparse.Namespace) -> None:
    """The report of quantizing a small model, in the terminal and as a plot."""
    terminal = Terminal(setup.folder)
    terminal.type("mlxlm prepare --builtin small-world --size 2MB --out text.jsonl")
    terminal.type(
        "mlxlm pretrain text.jsonl --preset 0.3m --steps 400 --batch-size 8 --max-seq-length 128 --out stories"
    )
    terminal = Terminal(setup.folder)
    terminal.type("mlxlm quantize stories --out stories-4bit")
    terminal.save("quantize", "mlxlm quantize")
    _write("quantization.png", (setup.folder / "stories-4bit" / "quantization.png").read_bytes())


def open_page(browser: Browser, address: str) -> Page:
    """Open a page of 1100 x 640 pixels."""
    page = browser.new_page(viewport={"width": 1100, "height": 640})
    page.goto(address, wait_until="networkidle")
    return page


def report(setup: argparse.Namespace) -> None:
    """The HTML report of the run."""
    page = open_page(setup.browser, (setup.folder / "run" / "report.html").as_uri())
    _write("report.png", page.screenshot())


def page(setup: argparse.Namespace) -> None:
    """The chat page of the server."""
    command = [sys.executable, ROOT / "cli.py", "serve", setup.model, "--port", "0", "--log-level", "error"]
    command += ["--temperature", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=setup.folder, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            address = re.search(r"http://[\d.:]+", server.stderr.readline())[0]
            page = open_page(setup.browser, address)
            for number, question in enumerate(setup.questions, 1):
                page.fill("#question", question)
                page.keyboard.press("Enter")
                page.wait_for_function(f"document.querySelectorAll('#messages .assistant').length == {number}")
                page.wait_for_selector("#stop", state="hidden", timeout=120_000)
            _write("chat-page.png", page.screenshot())
        finally:
            server.terminate()


JOBS = {job.__name__: job for job in (quickstart, chat, train, quantize, report, page)}


def main() -> None:
    """Make the pictures that --only names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", help="what to call MODEL in the pictures")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="for the chats")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    setup = parser.parse_args()
    wanted = {*setup.only, *(["train"] if "report" in setup.only else [])}
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        setup.browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        setup.folder = Path(temporary)
        name = setup.name or setup.model.name
        (setup.folder / name).symlink_to(setup.model.resolve())
        setup.model = name
        for name, job in JOBS.items():
            if name in wanted:
                job(setup)


if __name__ == "__main__":
    main()
