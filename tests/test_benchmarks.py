"""The benchmarks import names that exist, and pass options that exist to mlxlm."""

import ast
import importlib
import json
import sys

import pytest

from mlxlm.cli.main import COMMANDS, app
from tests.paths import ROOT

FILES = sorted((ROOT / "benchmarks").glob("*.py"))
OTHER_PROGRAMS = {"--hf-path", "--mlx-path", "--q-bits", "--model", "--make", "--step", "--one", "--serve", "--work"}
OTHER_PROGRAMS |= {"--low-bits", "--high-bits", "--fallback-bits", "--embed-bits", "--quantized-model", "--data-path"}
OTHER_PROGRAMS |= {"--num-samples"}  # mlx_lm
OTHER_PROGRAMS |= {"--n_ctx", "--interrupt_requests"}
OTHER_PROGRAMS |= {"--allowedTools", "--auto", "--sandbox", "--skip-git-repo-check", "--version", "--config"}  # agents
OTHER_PROGRAMS |= {"--message", "--no-analytics", "--no-check-update", "--no-git", "--no-pretty", "--yes-always"}
OTHER_PROGRAMS |= {"--worker", "--shard-mb", "--sizes"}  # these call themselves


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_and_options_exist(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mlxlm"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
    parsed = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument"
        for argument in node.args
    }
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    options = {text for text in strings if text.startswith("--") and text.isascii() and " " not in text} - parsed
    commands = [app.get_command(None, name) for name in COMMANDS]
    commands += [sub for command in commands for sub in getattr(command, "commands", {}).values()]
    known = {
        option
        for command in commands
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert options <= known | OTHER_PROGRAMS | {"--help", "--"}


def test_table_of_model_types(monkeypatch, capsys):
    for name in ("torch", "transformers", "mlx_lm.utils"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["families.py", "granitemoe", "llama", "gpt_neo"])
    importlib.import_module("families").main()
    rows = json.loads(capsys.readouterr().out)["types"]
    assert [(row["model_type"], row["how"]) for row in rows] == [
        ("llama", "native"), ("granitemoe", "in the batch"), ("gpt_neo", "refused")
    ]  # fmt: skip
    assert all(row["error"] < 1e-3 for row in rows[:2])
