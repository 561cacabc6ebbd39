"""`mlxlm doctor` and `mlxlm models presets`."""

import json

import pytest

from mlxlm.cli.main import _run
from tests.run_command import run_command


def test_doctor_and_presets_print_json(capsys):
    assert _run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["matmul_gflops"] > 0 and facts["memory"] > 0 and facts["blas"]
    assert _run(["models", "presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["5m"]["hidden_size"] == 256


def test_doctor_shows_a_gpus_own_memory(monkeypatch, capsys):
    from mlxlm.backend import device
    from mlxlm.doctor import facts

    info = {"device_name": "a GPU", "total_memory": 24 << 30}
    for module in (facts, device):
        monkeypatch.setattr(module, "ON_CPU", False)
    monkeypatch.setattr(facts.mx, "device_info", lambda: info)
    monkeypatch.setattr(facts, "measure_matmul", lambda: 1.0)
    assert _run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["working_set"] == 24 << 30
    del info["total_memory"]
    assert _run(["doctor"]) == 0
    assert "working set              unknown" in capsys.readouterr().out


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Replaces the checks of --full by one that passes and one that fails."""
    from mlxlm.doctor.check import Check, CheckFailed, run_check

    def fail():
        raise CheckFailed("2 is not\n3", {"error": 1.0, "tolerance": 0.5})

    checks = [Check("kernels", "good", lambda: {"gflops": 5.0}), Check("kernels", "bad", fail, "a case")]

    def run():
        yield None, len(checks)
        for check in checks:
            yield run_check(check), len(checks)

    monkeypatch.setattr("mlxlm.doctor.run_in_processes", run)
    monkeypatch.chdir(tmp_path)
    return checks


def test_full_writes_a_new_report_each_time(suite, tmp_path):
    for name in ("mlxlm-doctor.json", "mlxlm-doctor-2.json"):
        done = run_command("doctor", "--full")
        assert done.returncode == 1
        assert b"failed: kernels, bad: a case: 2 is not 3" in done.stderr
        assert f"1 passed, 1 failed in 0s; the report is in {name}".encode() in done.stderr
        assert b"5 GFLOP/s" in done.stdout and b"good" in done.stdout
        assert len(json.loads((tmp_path / name).read_text())["checks"]) == 2
    del suite[1]
    done = run_command("doctor", "--full", "--out", "here/new.json", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "here/new.json").read_text())


def test_full_overwrites_nothing(suite, tmp_path):
    (tmp_path / "file").touch()
    done = run_command("doctor", "--full", "--out", "file")
    assert done.returncode == 1 and b"file already exists (try: another --out)" in done.stderr
    assert run_command("doctor", "--out", "new").returncode == 2
