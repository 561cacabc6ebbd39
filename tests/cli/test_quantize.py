"""`mlxlm quantize`."""

import json

import pytest

from mlxlm.cli.main import _run
from mlxlm.quantize import recover
from tests.run_command import run
from tests.small_models import arrays_of, random_decoder, write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_config, tiny_tokenizer):
    weights = {name: 4 * w if w.ndim == 2 else w for name, w in arrays_of(random_decoder(tiny_config)).items()}
    return write_folder(tmp_path_factory.mktemp("command") / "model", weights, tiny_config, tiny_tokenizer)


def test_the_report(model, tmp_path, text_file):
    code, out, err = run("quantize", model, "--out", tmp_path / "out", "--bits", "3", "--eval-text", text_file)
    assert code == 0 and "Traceback" not in err
    for name in ("bits per weight", "KL divergence", "bits per byte", "top-1 agreement"):
        assert name in out
    assert "largest errors of weights" in out and f"evaluated on: {text_file}" in out
    assert "groups of 32, because the requested size doesn't divide the width: model.embed_tokens" in out
    assert (tmp_path / "out" / "quantization.png").is_file()


def test_json(model, tmp_path, text_file):
    settings = ("--method", "gptq", "--calibration-text", text_file, "--json")
    code, out, _ = run("quantize", model, "--out", tmp_path / "out", *settings)
    report = json.loads(out)
    assert code == 0 and report["method"] == "gptq" and len(report["worst_layers"]) == 5
    assert report["metrics"]["kl"] > 0
    assert "last tenth" in report["calibration_text"] and "last tenth" in report["metrics"]["text"]


def test_recovery(model, tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(recover, "STEPS", 2)
    code, out, err = run("quantize", model, "--out", tmp_path / "out", "--recover", "--calibration-text", text_file)
    assert code == 0 and "before recovery: KL" in out, err
    assert f"calibrated on: {text_file}" in out


def test_max_size(model, tmp_path, text_file):
    settings = ("--calibration-text", text_file, "--no-evaluate", "--max-size", "0.042 MB")
    code, out, _ = run("quantize", model, "--out", tmp_path / "out", *settings)
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir() if "quantization" not in file.name)
    assert code == 0 and size <= 42_000 and "matrices in" in out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--bits", "4", "--recipe", "mixed_3_4"], "--bits and --recipe both choose"),
        (["--mode", "mxfp4", "--bits", "4"], "--bits would have no effect"),
        (["--calibration-text", __file__], "--calibration-text would have no effect"),
        (["--max-size", "many"], "'many' is not a size"),
        (["--max-size", "0GB"], "--max-size is 0, it must be a whole number above 0"),
        (["--target-bpw", "-1"], "--target-bpw is -1.0, it must be a number above 0"),
        (["--bits", "7"], "'7' is not one of"),
    ],
)
def test_wrong_usage(tmp_path, capsys, options, message):
    assert _run(["quantize", "model", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_failure_is_one_line(tmp_path, capsys):
    assert _run(["quantize", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("error:") == 1
