"""Signs of life: on a terminal, and nowhere else."""

import subprocess
import sys

import pexpect
import pytest

SCRIPT = """
import time
from mlxlm.cli import waiting
waiting._AFTER = 0.1
with waiting.waiting("loading [x]") as update:
    time.sleep({first})
    update("reading")
    time.sleep({first})
print("done")
"""


def test_a_long_wait_shows_what_is_waited_for():
    script = "import mlxlm.cli.render, rich.status\n" + SCRIPT.format(first=1)  # importing isn't waited for
    child = pexpect.spawn(sys.executable, ["-c", script], encoding="utf-8", timeout=60)
    child.expect_exact("loading [x]")
    child.expect_exact("reading")
    child.expect("\x1b\\[2K.*done")  # the line is gone before anything else is said
    child.expect(pexpect.EOF)


def test_a_short_wait_shows_nothing():
    child = pexpect.spawn(sys.executable, ["-c", SCRIPT.format(first=0)], encoding="utf-8", timeout=20)
    child.expect(pexpect.EOF)
    assert child.before == "done\r\n"


def test_nothing_without_a_terminal():
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(first=0.3)], capture_output=True, timeout=20)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


@pytest.fixture
def tally():
    from mlxlm.cli.job_progress import Tally

    tally = Tally(2)
    tally.begin(10)
    return tally


def test_what_is_expected_follows_what_the_lines_turn_out_to_be(tally):
    assert tally.expected == 20
    for rows in (2, 0, 1, 5):
        tally.expect(rows)
    assert tally.expected == 20 + 0 - 2 - 1 + 3
    tally.results, tally.skipped, tally.tokens = 4, 6, 1000
    assert tally.line().startswith("10 of 20 done, ") and tally.line().endswith(" left")


def test_a_line_a_minute_without_a_terminal(tally, capsys, monkeypatch):
    from mlxlm.cli import job_progress as module

    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    tally.begin(None)
    with module.progress(tally) as show:
        for _ in range(180):
            clock[0] += 1
            tally.results, tally.tokens = tally.results + 1, tally.tokens + 10
            show()
    assert capsys.readouterr().err == "".join(f"{n} done, 10 tokens/s\n" for n in (60, 120, 180))
