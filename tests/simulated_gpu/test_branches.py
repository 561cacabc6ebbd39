"""Code that only runs off the CPU is found by its conditions, and what no test ran is reported."""

from textwrap import dedent

import pytest

from tests.simulated_gpu import branches

SOURCE = """
ROWS = 8 if ON_CPU else 256
def read(x):
    if ON_CPU:
        return on_cpu(x)
    y = _load(x)
    if y:
        y += 1
    return y
def _load(x):
    return x
def both(x):
    if x:
        return 1
    if not ON_CPU and metal_available():
        launch(x)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(branches, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(dedent(SOURCE).lstrip())
    return branches.Module(tmp_path / "module.py")


def test_requirements(module):
    run = {r.line for r in module.requirements if r.outcome is None}
    conditions = {(r.line, r.outcome) for r in module.requirements if r.outcome is not None}
    assert run == {1, 5, 6, 7, 8, 10, 15}
    assert conditions == {(3, False), (6, True), (6, False), (14, True), (14, False)}


def test_what_was_run(module):
    """Lines that ran one after the other: on a GPU, with a y that is 0, without Metal."""
    arcs = {(-1, 1), (3, 5), (5, 6), (6, 8), (-10, 10), (14, -11)}
    unmet = [str(r) for r in module.requirements if not r.is_met(arcs)]
    assert [text.split(":", 1)[1] for text in unmet] == [
        "6: `if y:` was never true",
        "7: `y += 1` was not run",
        "14: `if not ON_CPU and metal_available():` was never true",
        "15: `launch(x)` was not run",
    ]
