"""The spinner: in a terminal, after a delay."""

import subprocess
import sys

import pexpect

SCRIPT = """
import time
from mlxlm.cli import render
render._DELAY = 0.1
with render.spinner("loading [x]") as update:
    time.sleep({first})
    update("reading")
    time.sleep({first})
print("done")
"""


def test_a_long_wait_shows_its_label():
    script = "import rich.status\n" + SCRIPT.format(first=0.5)
    child = pexpect.spawn(sys.executable, ["-c", script], encoding="utf-8", timeout=60)
    child.expect_exact("loading [x]")
    child.expect_exact("reading")
    child.expect("\x1b\\[2K.*done")  # the line is cleared before other output
    child.expect(pexpect.EOF)


def test_a_short_wait_shows_nothing():
    child = pexpect.spawn(sys.executable, ["-c", SCRIPT.format(first=0)], encoding="utf-8", timeout=20)
    child.expect(pexpect.EOF)
    assert child.before == "done\r\n"


def test_nothing_without_a_terminal():
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(first=0.3)], capture_output=True, timeout=20)
    assert (done.stdout, done.stderr) == (b"done\n", b"")
