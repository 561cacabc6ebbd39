"""Tests are skipped where the harness can't run, unless MLXLM_REQUIRE_HARNESS=1 is set."""

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
