"""Verification of what was written."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_weights, save_weights
from mlxlm.checkpoint.huggingface import copy_tokenizer as carry
from mlxlm.convert.cross_check import BackendOutput, BackendRejected
from mlxlm.quantize import quantize
from mlxlm.utils.errors import CheckpointError


def test_verification_and_cross_check(model, tmp_path):
    pytest.importorskip("mlx_lm")
    report = quantize(model, tmp_path / "out", bits=4, evaluate=False, cross_check=True)
    assert {check.name: check.result for check in report.checks} == dict.fromkeys(
        ("tensors", "tokenizer", "configuration", "mlx_lm"), "equal"
    )
    assert report.to_dict()["checks"][0]["name"] == "tensors"


def test_changed_values_on_disk_are_an_error(model, tmp_path, monkeypatch):
    def spoil(folder, *arguments):
        written = load_weights(folder)
        written["model.norm.weight"] = written["model.norm.weight"] + 1
        mx.eval(written)
        save_weights(folder, written)
        return []

    monkeypatch.setattr(
        "mlxlm.quantize.pipeline.copy_tokenizer", lambda source, folder: spoil(folder) or carry(source, folder)
    )
    with pytest.raises(CheckpointError, match=r"out: model.norm.weight is not what was written"):
        quantize(model, tmp_path / "out", evaluate=False)
    assert not list(tmp_path.iterdir())


def test_folder_that_mlx_lm_rejects_is_an_error(model, tmp_path, monkeypatch):
    def refuses(backend, path, *arguments, **options):
        if "source" not in str(path):
            raise BackendRejected(f"{backend} can't read it: {path} is wrong")
        return BackendOutput([0] * 32, [0.0] * 32, 1.0)

    monkeypatch.setattr("mlxlm.convert.cross_check.run_backend", refuses)
    with pytest.raises(CheckpointError, match="mlx_lm can't read it.*without cross_check"):
        quantize(model, tmp_path / "out", evaluate=False, cross_check=True)
    assert not list(tmp_path.iterdir())
