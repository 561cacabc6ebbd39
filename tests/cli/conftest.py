"""Fixtures of the command-line tests."""

import pytest

from mlxlm.cli.main import _run
from tests.cli.helpers import QUICK
from tests.generation.conftest import lm  # noqa: F401


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, make_text):
    """A finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text(make_text(4000), encoding="utf-8")
    assert _run(["pretrain", str(folder / "text.txt"), "--preset", "0.3m", "--out", str(folder / "run"), *QUICK]) == 0
    return folder / "run"
