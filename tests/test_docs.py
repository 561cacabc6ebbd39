"""The examples of docs/ run, and README.md and docs/ name only commands, options and modules that exist."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from mlxlm.cli.main import COMMANDS, app
from mlxlm.families import config_to_hf
from tests.paths import ROOT
from tests.run_command import run_command

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
OTHER_PROGRAMS = {"--backend", "--over"}  # options of mlx.launch and mlx.distributed_config
TOOLS = ("jq", "xargs")
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config, tiny_tokenizer):
    """A folder with `my-model`, which has a chat template, and a `bin` with this checkout's mlxlm."""
    from mlx.utils import tree_flatten

    from mlxlm.backend.mlx import mx
    from mlxlm.model import Decoder
    from mlxlm.utils.json_files import write_json

    folder = tmp_path_factory.mktemp("docs")
    model = Decoder(tiny_config.with_changes(num_attention_heads=2, head_dim=32, max_position_embeddings=1024))
    model.init_weights(seed=3)
    (folder / "my-model").mkdir()
    write_json(folder / "my-model" / "config.json", config_to_hf(model.config))
    mx.save_safetensors(str(folder / "my-model" / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tiny_tokenizer.save(folder / "my-model")
    tiny_tokenizer.chat_template = None
    (folder / "bin").mkdir()
    command = folder / "bin" / "mlxlm"
    command.write_text(f"#!{sys.executable}\nfrom mlxlm.cli.main import main\nmain()\n")
    command.chmod(0o755)
    return folder


def commands(content):
    """The commands of a shell example; a quoted text may have several lines."""
    text = ""
    for line in content.splitlines():
        text += f"{line}\n"
        try:
            shlex.split(text)
        except ValueError:  # within quotes
            continue
        yield text
        text = ""
    assert not text


def run(command):
    """Run a command of the shell; in this process if it is mlxlm alone, which saves imports."""
    if command.startswith("mlxlm ") and not re.search(r"[|<>$;&]|--num-processes", command):
        done = run_command(*shlex.split(command)[1:])
    else:
        shell = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(shell, capture_output=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    assert b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_every_example_runs(folder, page, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}:{Path(sys.executable).parent}")  # of mlx.launch
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    blocks = _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    missing = {tool for tool in TOOLS if not shutil.which(tool)}
    skipped = set()
    for language, name, content in blocks:
        if name:
            (folder / name).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(compile(content, page, "exec"), {"__name__": "__main__"})
        else:
            assert language == "sh"
            for command in commands(content):
                needed = {tool for tool in missing if re.search(rf"\b{tool}\b", command)}
                skipped |= needed
                if not needed:
                    run(command)
    if skipped:
        pytest.skip(f"the examples with {', '.join(skipped)}, which are not installed")


def test_every_event_field_is_documented():
    from mlxlm.train.events import Event

    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (DOCS / "runs.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    for event in get_args(Event):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower()
        names = [f.name for f in fields(event) if f.name not in ("step", "path")]
        missing = [field for field in names if f"`{field}`" not in documented[name]]
        assert not missing, f"{name}: {missing}"


def options_of(name):
    """The options of a command and its subcommands, by all their names."""
    command = app.get_command(None, name)
    commands = [command, *getattr(command, "commands", {}).values()]
    return {
        option for one in commands for parameter in one.params for option in parameter.opts + parameter.secondary_opts
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_and_option_exists(page):
    text = page.read_text(encoding="utf-8")
    all_options = set().union(*map(options_of, COMMANDS), OTHER_PROGRAMS, {"--help"})
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) <= all_options
    code = re.findall(r"^```sh\n(.*?)^```$|^    ([^\n]*)$", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for part in [*map("".join, code), *inline]:
        for name, arguments in re.findall(r"(?:^|[|(] |-- |do )mlxlm\s+([a-z][a-z-]+)([^#|\n]*)", part, re.MULTILINE):
            assert name in COMMANDS, part
            assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", arguments)) <= options_of(name), part


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_imported_name_exists(page):
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_every_option_of_generate_is_documented():
    text = (DOCS / "scripting.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"--[a-z][a-z-]+", text))
    assert {name for name in options_of("generate") if name.startswith("--")} - documented == {"--verbose", "--debug"}
