"""`mlxlm doctor --full` from one end to the other, at tiny sizes: on the CPU, and on a simulated or real GPU."""

import json
import sys

import pytest

import mlxlm.doctor
from mlxlm.doctor.worker import run_in_processes
from mlxlm.kernels.dispatch import metal_available
from mlxlm.utils.resources import resource
from tests.run_command import run_command

SUITE = """
import sys, tempfile
from pathlib import Path
from mlxlm.doctor.worker import full_suite
from mlxlm.doctor.worker import serve
from tests.doctor.tiny import TINY

serve(full_suite(Path(tempfile.mkdtemp(dir=sys.argv[1])), TINY), int(sys.argv[2]))
"""
NOT_AT_THIS_SIZE = {"the loss falls"}  # in four steps


@pytest.fixture
def report(monkeypatch, tmp_path):
    monkeypatch.setattr(mlxlm.doctor, "run_in_processes", lambda: run_in_processes([sys.executable, "-c", SUITE]))
    done = run_command("doctor", "--full", "--out", tmp_path / "report.json", "--json")
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    return report


def test_everything_passes(report):
    failed = {check["name"]: check["reason"] for check in report["checks"] if check["status"] == "failed"}
    assert failed.keys() <= NOT_AT_THIS_SIZE, failed
    assert all(check["seconds"] >= 0 for check in report["checks"])
    # Each Metal kernel was run where there is Metal, and by nobody elsewhere.
    launched = {kernel for check in report["checks"] for kernel in check["values"].get("kernels", ())}
    sources = {path.stem for path in resource("metal_kernels").glob("*.metal")}
    assert launched == (sources if metal_available() else set())
    timed = [check["values"] for check in report["checks"] if check["section"] == "kernel benchmarks"]
    assert any("metal_ms" in values for values in timed) == metal_available()
    assert report["facts"]["metal"] == metal_available() or "(NVIDIA" in report["facts"]["device"]
