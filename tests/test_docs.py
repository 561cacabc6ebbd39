"""Every example of docs/ runs as it stands there, on a tiny model."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from mlxlm.cli.main import COMMANDS
from mlxlm.families import config_to_hf
from tests.paths import ROOT

DOCS = ROOT / "docs"
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
    model = Decoder(tiny_config.with_changes(num_attention_heads=2, head_dim=32, max_position_embeddings=512))
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


def run(folder, command):
    path = f"{folder / 'bin'}:{os.environ['PATH']}:{Path(sys.executable).parent}"  # mlx.launch is there
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_every_example_runs(folder, page):
    blocks = _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    left_out = set()
    for language, name, content in blocks:
        if name:
            (folder / name).write_text(content, encoding="utf-8")
        elif language == "python":
            run(folder, [sys.executable, "-c", content])
        else:
            assert language == "sh"
            missing = {tool for tool in TOOLS if re.search(rf"\b{tool}\b", content) and not shutil.which(tool)}
            left_out |= missing
            if not missing:
                run(folder, ["bash", "-euo", "pipefail", "-c", content])
    if left_out:
        pytest.skip(f"all but the examples with {', '.join(left_out)}, which this machine lacks")


def test_every_field_of_the_log_is_in_its_table():
    from mlxlm.train.events import Event

    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (DOCS / "runs.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    for event in get_args(Event):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower()
        lacking = [f.name for f in fields(event) if f.name not in ("step", "path") and f"`{f.name}`" not in told[name]]
        assert not lacking, f"{name}: {lacking}"


def test_every_option_of_the_page_is_one_of_the_command():
    from mlxlm.cli.generate import generate

    options = {name for parameter in generate.params for name in parameter.opts}
    text = (DOCS / "scripting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--no-chat", "--out"}  # those of quickstart
    assert named <= options
    assert {name for name in options if name.startswith("--")} - named - {"--debug"} == {"--verbose"}
    assert set(re.findall(r"\bmlxlm ([a-z]+)\b", text)) <= set(COMMANDS)
