"""Tests are skipped where the harness can't run, unless MLXLM_REQUIRE_HARNESS=1 is set."""

import os
import tempfile

import pytest

from tests.metal import harness
from tests.metal.harness import build


@pytest.mark.parametrize("required, outcome", [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_compiler_skips_or_fails(monkeypatch, request, required, outcome):
    monkeypatch.setattr(harness, "available", lambda: "there is not clang")
    monkeypatch.setenv("MLXLM_REQUIRE_HARNESS", required)
    with pytest.raises(outcome, match="there is not clang"):
        request.getfixturevalue("needs_harness")


def test_a_named_compiler_that_is_none_is_no_reason_to_take_another(monkeypatch):
    monkeypatch.setenv("METAL_HARNESS_CLANG", "true")
    build.clang.cache_clear()
    try:
        with pytest.raises(harness.Fault, match="METAL_HARNESS_CLANG=true is not clang"):
            build.clang()
    finally:
        build.clang.cache_clear()


@pytest.mark.parametrize("kind", ["own", "open to others", "file", "link"])
def test_objects_are_kept_only_where_nobody_else_writes(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"metal-harness-{os.getuid()}"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700 if kind == "own" else 0o777)
        (folder / "old.so").touch()
        os.utime(folder / "old.so", (0, 0))
    assert (build._folder.__wrapped__() == folder) == (kind == "own")
    assert (folder / "old.so").exists() == (kind == "open to others")
