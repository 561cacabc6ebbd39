"""The units for launchd and systemd in docs/server.md."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
import sys

import pytest

from mlxlm.cli.serve import serve
from mlxlm.server.options import ServerOptions
from tests.paths import ROOT


def block(language: str) -> str:
    """The only code block of a language."""
    [text] = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/server.md").read_text(), re.S)
    return text


def check_command(program: str, command: str, *arguments: str) -> None:
    """Check that it is `mlxlm serve` with valid options, without running it."""
    assert program.endswith("/mlxlm") and command == "serve"
    serve.make_context("serve", list(arguments))


def test_the_property_list_of_launchd():
    values = plistlib.loads(block("xml").encode())
    check_command(*values["ProgramArguments"])
    assert values["RunAtLoad"] and values["KeepAlive"] == {"SuccessfulExit": False}
    assert values["ExitTimeOut"] > ServerOptions().shutdown_timeout


def test_the_unit_of_systemd(tmp_path):
    text = block("ini")
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(text)
    check_command(*parser["Service"]["ExecStart"].split())
    assert parser["Service"].getint("TimeoutStopSec") > ServerOptions().shutdown_timeout
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "mlxlm.service"
    unit.write_text(text.replace("%h/.venv/bin/mlxlm", sys.executable))
    done = subprocess.run(["systemd-analyze", "--user", "verify", unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
