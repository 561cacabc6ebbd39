"""Where the harness can't run its tests are skipped, except where the environment promises that it can."""

import harness
import pytest


@pytest.mark.parametrize("required, outcome", [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_compiler_skips_or_fails(monkeypatch, request, required, outcome):
    monkeypatch.setattr(harness, "available", lambda: "there is no clang")
    monkeypatch.setenv("MLXLM_REQUIRE_HARNESS", required)
    with pytest.raises(outcome, match="there is no clang"):
        request.getfixturevalue("needs_harness")
