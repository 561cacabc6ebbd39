"""The programs of examples/ run, with a tiny model that answers anything."""

import csv
import io
import os
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.stand_ins import make_stand_ins, serve

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config, tiny_tokenizer, make_text):
    folder = make_stand_ins(tmp_path_factory.mktemp("examples"), tiny_config, tiny_tokenizer, make_text)
    (folder / "notes").mkdir()
    (folder / "notes" / "cat.txt").write_text("The cat sat on a mat.\n\nTwo birds sat in the garden.\n")
    (folder / "notes" / "rain.txt").write_text("The garden is old.\n" * 200)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serve(folder / "my-model") as address:
        yield ("--base-url", f"http://{address}/v1")


def run(folder, name, *arguments, stdin=None):
    command = [sys.executable, ROOT / "examples" / f"{name}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"    python examples/{path.name} " in text.split('"""')[1]


def test_summarize_folder(folder):
    lines = run(folder, "summarize_folder", "my-model", "notes").splitlines()
    assert [line.split(":")[0] for line in lines] == ["cat.txt", "rain.txt"]


def test_summarize_folder_without_files(folder):
    assert run(folder, "summarize_folder", "my-model", "notes", "--pattern", "*.none") == ""


def test_extract_to_csv(folder):
    (folder / "reviews.txt").write_text("The mat is good.\n\nThe rain, and the old garden.\n")
    rows = list(csv.DictReader(io.StringIO(run(folder, "extract_to_csv", "my-model", "reviews.txt"))))
    assert [row["text"] for row in rows] == ["The mat is good.", "The rain, and the old garden."]
    assert all(row["opinion"] in ("good", "bad", "mixed") and 1 <= int(row["stars"]) <= 5 for row in rows)


def test_ask_notes(folder, server):
    output = run(folder, "ask_notes", "my-model", "notes", "Where did the cat sit?", *server)
    assert "cat.txt" in output.splitlines()[-1]


def test_tool_chat(folder, server):
    assert run(folder, "tool_chat", "my-model", *server, stdin="What time is it?\nAnd 6 times 7?\n")


def test_pretrain_until_stops_and_continues(folder):
    command = ("stories.txt", "--out", "run", "--preset", "0.3m", "--steps", "6", "--eval-every", "2")
    output = run(folder, "pretrain_until", *command, "--bits-per-byte", "99")
    assert "done after 2 steps" in output and len(output.splitlines()) > 2
    assert "done after 6 steps" in run(folder, "pretrain_until", *command, "--bits-per-byte", "0")
