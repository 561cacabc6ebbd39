"""`mlxlm kernels list` and `bench`."""

import json

import pytest

from mlxlm.cli.main import _run
from mlxlm.families import config_to_hf
from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.dispatch import TOLERANCE, metal_available


@pytest.fixture
def tiny_model(tmp_path, tiny_config, new_machine, monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", metal_available)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    return str(tmp_path)


def run_json(capsys, *args):
    assert _run([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list(tiny_model, capsys):
    found = run_json(capsys, "kernels", "list", tiny_model)
    assert found["mode"] == "auto"
    names = {operation["case"].split()[0] for operation in found["operations"]}
    assert names >= {"rms_norm", "add_rms_norm", "decode_attention", "prompt_attention", "training_attention"}
    assert all(operation["why"] and operation["path"] in dispatch.MODES for operation in found["operations"])
    assert _run(["kernels", "list", "0.3m"]) == 0
    assert "decode_attention" in capsys.readouterr().out


def test_bench_saves_the_fastest(tiny_model, capsys):
    found = run_json(capsys, "kernels", "bench", tiny_model, "--repeats", "1")
    for case in found["cases"]:
        assert case["fastest"] in case["paths"]
        for timing in case["paths"].values():
            assert len(timing["milliseconds"]) == 1 and min(timing["milliseconds"]) > 0
            assert timing["error"] < TOLERANCE[case["case"].split()[1]] and timing["peak_bytes"] > 0
    listed = run_json(capsys, "kernels", "list", tiny_model)
    for case, operation in zip(found["cases"], listed["operations"], strict=True):
        assert operation["case"] == case["case"] and "measured fastest here" in operation["why"]
        assert operation["path"] == case["fastest"] == measurements.fastest_path(case["case"])


def test_the_environment_variable(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "_environment", "blockwise")
    found = run_json(capsys, "kernels", "list", tiny_model)
    paths = {operation["case"].split()[0]: operation["path"] for operation in found["operations"]}
    assert paths["training_attention"] == "blockwise"
    monkeypatch.setattr(dispatch, "_environment", "fastest")
    assert _run(["kernels", "list", tiny_model]) == 1
    assert "auto, metal, mlx, blockwise" in capsys.readouterr().err
