"""`mlxlm quickstart`."""

import json
from itertools import islice

import pytest

from mlxlm.cli.main import _run
from mlxlm.data.builtin import python_reference
from tests.cli.helpers import error_line


@pytest.fixture
def hasty(tmp_path, monkeypatch):
    """Training that ends after a step, in an empty folder."""
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 0.06)  # too little to learn anything
    for name in ("_MIN_TOKENS", "_MIN_STEPS"):
        monkeypatch.setattr(f"mlxlm.train.budget.{name}", 0)
    monkeypatch.setattr("mlxlm.cli.quickstart.MAX_SEQ_LENGTH", 64)
    monkeypatch.setattr("mlxlm.train.run.plot_losses", lambda history, path: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hasty")
def test_with_and_without_a_file(tmp_path, monkeypatch, capsys):
    """The text of few words supports fewer tokens than the default."""
    topics = list(islice(python_reference(), 40))
    monkeypatch.setattr("mlxlm.data.builtin.python_reference", lambda: iter(topics))
    monkeypatch.setattr("mlxlm.cli.quickstart.VOCAB_SIZE", 600)
    (tmp_path / "simple.txt").write_text("The cat sat on the mat.\n" * 2000)
    for arguments, name in ((["simple.txt"], "mlxlm-quickstart"), ([], "mlxlm-quickstart-2")):
        assert _run(["quickstart", *arguments, "--minutes", "0.001"]) == 0
        out, err = capsys.readouterr()
        assert out.endswith("\n") and f"mlxlm chat {name}/4bit" in err and "bits per byte" in err
        assert (tmp_path / name / "4bit/model.safetensors").exists()
    config = json.loads((tmp_path / "mlxlm-quickstart/4bit/config.json").read_text())
    assert 263 < config["vocab_size"] < 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("Hello there.\n", "13 characters are too few"),
        ("The cat sat. " * 80, "are too few to learn"),
        (f"{'a' * 2000}\n" * 10, "less than one sequence of 64 (try: more text"),
        ("\n" * 20_000, "no text to train a tokeniz"),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_too_little_text(text, problem, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text)
    line = error_line(capsys, "quickstart", "text.txt", "--minutes", "0.001")
    assert problem in line and "--" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
