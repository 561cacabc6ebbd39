"""The spinner, and the progress of `generate --jsonl`."""

import subprocess
import sys

import pexpect
import pytest

SCRIPT = """
import time
from mlxlm.cli import spinner
spinner._DELAY = 0.1
with spinner.spinner("loading [x]") as update:
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
def job_progress():
    from mlxlm.cli.job_progress import JobProgress

    job_progress = JobProgress(2)
    job_progress.begin(10)
    return job_progress


def test_what_is_expected_follows_what_the_lines_turn_out_to_be(job_progress):
    assert job_progress.expected == 20
    for rows in (2, 0, 1, 5):
        job_progress.expect(rows)
    assert job_progress.expected == 20 + 0 - 2 - 1 + 3
    job_progress.results, job_progress.skipped, job_progress.tokens = 4, 6, 1000
    assert job_progress.line().startswith("10 of 20 done, ") and job_progress.line().endswith(" left")


def test_a_line_a_minute_without_a_terminal(job_progress, capsys, monkeypatch):
    from mlxlm.cli import job_progress as module

    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    job_progress.begin(None)
    with module.progress(job_progress) as show:
        for _ in range(180):
            clock[0] += 1
            job_progress.results, job_progress.tokens = job_progress.results + 1, job_progress.tokens + 10
            show()
    assert capsys.readouterr().err == "".join(f"{n} done, 10 tokens/s\n" for n in (60, 120, 180))
