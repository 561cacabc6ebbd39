"""`mlxlm doctor` and `mlxlm presets`."""

import json

from mlxlm.cli.main import _run


def test_doctor_and_presets_print_json(capsys):
    assert _run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["matmul_gflops"] > 0 and facts["memory"] > 0 and facts["blas"]
    assert _run(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["5m"]["hidden_size"] == 256


def test_doctor_shows_a_gpus_own_memory(monkeypatch, capsys):
    from mlxlm.backend import device, mlx
    from mlxlm.plan import machines

    info = {"device_name": "a GPU", "total_memory": 24 << 30}
    for module in (mlx, device):
        monkeypatch.setattr(module, "ON_CPU", False)
    monkeypatch.setattr(mlx.mx, "device_info", lambda: info)
    monkeypatch.setattr(machines, "measure_matmul", lambda: 1.0)
    assert _run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["working_set"] == 24 << 30
    del info["total_memory"]
    assert _run(["doctor"]) == 0
    assert "working set              unknown" in capsys.readouterr().out
