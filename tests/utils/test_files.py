"""Atomic writes."""

import pytest

from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_folder


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_new_folder(tmp_path / "deep/a") as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "deep/a").exists()
    assert (tmp_path / "deep/a/x").read_text() == "x"
    with pytest.raises(CheckpointError, match="already exists"), atomic_new_folder(tmp_path / "deep/a"):
        pass
