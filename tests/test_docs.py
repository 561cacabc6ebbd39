"""The examples of README.md, CONTRIBUTING.md and docs/ run, or are checked, and their text names only what exists.

The blocks of a page run in their order, in a folder with small stand-ins: a model `my-model`, the texts `stories.txt`
and `book.txt`, the questions and answers `chats.jsonl`, and `questions.jsonl`. A block for 127.0.0.1:8080 talks to a
server of `small-world`. A comment above a block changes that:

    <!-- not run: REASON -->       its commands are parsed, its modules and names are looked up
    <!-- run with: OPTIONS -->     each of its commands of mlxlm gets these options too, to be quick
    <!-- run as: COMMAND -->       this runs instead, and the block is parsed

A block with a title (```jsonl title="requests.jsonl"```) is written to a file of this name; `text` is anything else.
"""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from mlxlm.cache import KVOptions
from mlxlm.cli.main import COMMANDS, app
from mlxlm.config.option import options_of as options_of_settings
from mlxlm.data import DataOptions
from mlxlm.evaluate.suite.suite import SuiteSize
from mlxlm.generation import GenerationOptions
from mlxlm.quantize import QuantizationSettings
from mlxlm.server.options import ServerOptions
from mlxlm.train import GRPOOptions, TokenizerOptions, TrainSettings
from mlxlm.train.draft_settings import DraftSettings
from tests.paths import ROOT
from tests.run_command import run_command
from tests.stand_ins import make_stand_ins, serve

DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *sorted(DOCS.rglob("*.md"))]
OTHER_OPTIONS = {"--backend", "--over", "--strict"}  # of mlx.launch, mlx.distributed_config, mypy
OTHER_OPTIONS |= {"--config", "--model", "--profile", "--settings"}  # of the clients in docs/clients.md
OTHER_OPTIONS |= {"--help", "--help-all", "--quickstart", "--device"}
OTHER_OPTIONS |= {"--sizes", "--classes", "--peers", "--contexts"}  # of benchmarks
OTHER_OPTIONS |= {"--repeat-penalty", "--grammar-file", "--slot-save-path", "--max-new-tokens"}  # of llama.cpp, ...
OTHER_PROGRAMS = re.compile(r"`(?:ollama|uv|llama-|mlx_lm\.|convert_hf_to_gguf)[^`]*`")
SETTINGS = [
    GenerationOptions,
    KVOptions,
    TrainSettings,
    GRPOOptions,
    TokenizerOptions,
    DataOptions,
    QuantizationSettings,
    DraftSettings,
    ServerOptions,
]
TOOLS = ("curl", "jq", "xargs")
ADDRESS = "127.0.0.1:8080"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
_BLOCK = re.compile(
    r'^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<content>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_OPERATOR = re.compile(r"[|&;<>()]+")


class Block(NamedTuple):
    """A block of code and the comment above it."""

    mark: str | None
    language: str
    title: str | None
    content: str


def blocks(page):
    """The blocks of a page; what looks like one but isn't is an error."""
    text = page.read_text(encoding="utf-8")
    found = [Block(**match.groupdict()) for match in _BLOCK.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page.name} has an indented block"
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory, tiny_config, tiny_tokenizer, make_text):
    """The stand-ins, and a `bin` with this checkout's mlxlm."""
    folder = make_stand_ins(tmp_path_factory.mktemp("docs"), tiny_config, tiny_tokenizer, make_text)
    (folder / "bin").mkdir()
    command = folder / "bin" / "mlxlm"
    command.write_text(f"#!{sys.executable}\nfrom mlxlm.cli.main import main\nmain()\n")
    command.chmod(0o755)
    return folder


@pytest.fixture
def folder(template, tmp_path, monkeypatch):
    """A copy of the stand-ins, as the current folder."""
    shutil.copytree(template, tmp_path / "docs")
    monkeypatch.chdir(tmp_path / "docs")
    path = (str(template / "bin"), os.environ["PATH"], str(Path(sys.executable).parent))  # the last has mlx.launch
    monkeypatch.setenv("PATH", ":".join(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # In this process, without what takes long and has tests of its own.
    monkeypatch.setattr("mlxlm.evaluate.suite.suite.FAST", SuiteSize(4, 3, 8))
    monkeypatch.setattr("mlxlm.quantize.report.SECONDS", 0.0)
    monkeypatch.setattr("mlxlm.quantize.pipeline.plot_quantization", lambda report, path: path.touch())
    monkeypatch.setattr("mlxlm.quantize.recover.STEPS", 2)
    return tmp_path / "docs"


@pytest.fixture(scope="module")
def address(template):
    """Host and port of a server of `small-world`."""
    with serve("small-world") as address:
        yield address


def shell_commands(content):
    """The commands of a shell example; a quoted text or a continued line may have several lines."""
    text = ""
    for line in content.splitlines():
        text += f"{line}\n"
        try:
            shlex.split(text, comments=True)
        except ValueError:  # within quotes
            continue
        if line.endswith("\\"):
            continue
        yield text.replace("\\\n", "")
        text = ""
    assert not text


def run(command, options=""):
    """Run a command of the shell; in this process if it is mlxlm alone, which saves imports."""
    if options:
        words = shlex.split(command, comments=True)
        assert words[0] == "mlxlm" and not any(map(_OPERATOR.fullmatch, words)), command
        command = f"{shlex.join(words)} {options}"
    if command.startswith("mlxlm ") and not re.search(r"[|<>$;&]|--num-processes", command):
        done = run_command(*shlex.split(command, comments=True)[1:])
    else:
        shell = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(shell, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    assert b"Traceback" not in done.stderr, done.stderr


def parse(arguments):
    """Parse arguments of mlxlm: an unknown command or option, and a value that an option can't have, is an error."""
    name, *arguments = arguments or ["--help"]
    if name == "--help":
        return
    command = app.get_command(None, name)
    assert command is not None, f"there is no command {name}"
    if isinstance(command, click.Group) and arguments:
        command = command.commands[arguments.pop(0)]
    context = click.Context(command)
    values, _, _ = command.make_parser(context).parse_args(arguments)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name in values:
            parameter.type_cast_value(context, values[parameter.name])


def parse_shell(content):
    """Parse the commands of mlxlm in a shell example."""
    for text in shell_commands(content):
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        simple = [[]]
        for token in lexer:
            if _OPERATOR.fullmatch(token):
                simple.append([])
            elif token == "mlxlm" and simple[-1] and (simple[-1][-1] == "--" or "=" in simple[-1][-1]):
                simple.append([token])  # after mlx.launch, or a variable
            else:
                simple[-1].append(token)
        for words in simple:
            if words and words[0] == "mlxlm":
                parse(words[1:])


def check_names(code):
    """Check that imported modules and names exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def check(block):
    """Check a block that doesn't run."""
    if block.language == "sh":
        parse_shell(block.content)
    elif block.language == "python":
        check_names(block.content)
    else:
        assert block.mark is None, f"{block.mark}: {block.language} never runs"
        assert block.language in ("json", "jsonl", "text"), f"{block.language!r} is neither run nor checked"
        texts = {"json": [block.content], "jsonl": block.content.splitlines()}.get(block.language, ())
        for text in texts:
            json.loads(text)


@every_page
def test_every_example_runs(page, folder, request):
    skipped = set()
    for block in blocks(page):
        kind, _, argument = (block.mark or "").partition(": ")
        content = block.content
        if ADDRESS in content and kind != "not run":
            content = content.replace(ADDRESS, request.getfixturevalue("address"))
        if block.title:
            Path(block.title).write_text(content, encoding="utf-8")
        if block.language not in ("sh", "python") or kind == "not run":
            check(block)
        elif block.language == "python":
            exec(compile(content, page, "exec"), {"__name__": "__main__"})
        else:
            assert kind in ("", "run with", "run as"), block.mark
            if kind == "run as":
                check(block)
                content, argument = argument, ""
            for command in shell_commands(content):
                needed = {tool for tool in TOOLS if re.search(rf"\b{tool}\b", command) and not shutil.which(tool)}
                skipped |= needed
                if not needed:
                    run(command, argument)
    if skipped:
        pytest.skip(f"the examples with {', '.join(skipped)}, which are not installed")


@pytest.mark.parametrize("example", ["mlxlm chatt", "mlxlm chat --modle x", "true | mlxlm generate m -n many > file"])
def test_a_wrong_example_that_does_not_run_is_found(example):
    with pytest.raises((AssertionError, click.UsageError)):
        check(Block("not run: a reason", "sh", None, f"{example}\n"))


def options_of(name):
    """The options of a command and its subcommands, by all their names, without those that are hidden."""
    command = app.get_command(None, name)
    params = [parameter for one in (command, *getattr(command, "commands", {}).values()) for parameter in one.params]
    shown = [parameter for parameter in params if not getattr(parameter, "hidden", False)]
    return {option for parameter in shown for option in parameter.opts + parameter.secondary_opts}


@every_page
def test_every_command_and_option_in_the_text_exists(page):
    text = OTHER_PROGRAMS.sub("", _BLOCK.sub("", page.read_text(encoding="utf-8")))
    of_program = {option for parameter in app.params for option in parameter.opts}
    all_options = set().union(*map(options_of, COMMANDS), of_program, OTHER_OPTIONS)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", re.sub(r"<!--.*?-->", "", text))) <= all_options
    for code in re.findall(r"`([^`]+)`", text):
        for name, arguments in re.findall(r"(?:^|[|(] |-- |do )mlxlm\s+([a-z][a-z-]+)([^#|]*)", code):
            assert name in COMMANDS, code
            assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", arguments)) <= options_of(name), code


@every_page
def test_every_named_file_exists(page):
    folders = "mlxlm|tests|benchmarks|docs|examples|metal_kernels|models"
    names = re.findall(rf"`((?:{folders})/[\w./-]+)", page.read_text(encoding="utf-8"))
    assert not [name for name in names if "NAME" not in name and not (ROOT / name).exists()]


@pytest.mark.parametrize("image", sorted((DOCS / "images").iterdir()), ids=lambda path: path.name)
def test_a_picture_is_small_and_loads_nothing(image):
    content = image.read_bytes()
    assert len(content) <= 150_000
    assert b"url(http" not in content and b"href=" not in content


def rendered(page):
    """A page as mkdocs renders it, with what its hooks fill in."""
    return runpy.run_path(str(DOCS / "mkdocs_hooks.py"))["on_page_markdown"]((DOCS / page).read_text(encoding="utf-8"))


def test_the_reference_has_every_command_and_option():
    text = rendered("reference/commands.md")
    for name in COMMANDS:
        assert f"\n## mlxlm {name}\n" in text
        missing = [option for option in options_of(name) if option.startswith("-") and option not in text]
        assert not missing, name
    assert "\nBatches and memory:\n" in text and "\n  Examples:\n" in text


def test_the_tables_have_every_option_of_a_settings_class():
    text = rendered("reference/options.md")
    assert "<!--" not in text
    assert "| `top_p` | `--top-p` | a number above 0 and at most 1 | 1.0 | Nucleus sampling" in text
    assert "| `mask_prompt` |  | true or false |" in text
    for settings in SETTINGS:
        assert not [name for name in options_of_settings(settings) if f"\n| `{name}` |" not in text]


def test_every_command_of_the_chat_is_documented():
    from mlxlm.chat.terminal.commands import COMMANDS

    text = (DOCS / "chat.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`{name}" not in text and name != "/exit"]


def test_every_event_field_is_documented():
    from mlxlm.train.events import Event

    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (DOCS / "runs.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    for event in Event.__subclasses__():
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower()
        names = [f.name for f in fields(event) if f.name not in ("step", "path")]
        missing = [field for field in names if f"`{field}`" not in documented[name]]
        assert not missing, f"{name}: {missing}"


def test_every_option_of_generate_is_documented():
    documented = set(re.findall(r"--[a-z][a-z-]+", rendered("scripting.md") + rendered("reference/options.md")))
    assert {name for name in options_of("generate") if name.startswith("--")} - documented == {"--verbose", "--debug"}
