"""convert, inspect and compare as a person meets them."""

import json

import pytest

from mlxlm._mlx import mx, tree_flatten
from mlxlm.checkpoint import save_weights
from mlxlm.cli.main import _run
from mlxlm.config import ModelConfig
from mlxlm.files import write_json
from mlxlm.model import Decoder


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setattr("mlxlm.convert._PEERS", {"huggingface": (), "gguf": (), "llama2.c": ()})
    monkeypatch.setattr("mlxlm.verify.GREEDY", 8)


@pytest.fixture
def model(tmp_path, tiny_tokenizer):
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=320, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(0)
    folder = tmp_path / "model"
    folder.mkdir()
    save_weights(folder, {name: w.astype(mx.float16) for name, w in tree_flatten(decoder.parameters())})
    write_json(folder / "config.json", config.to_dict())
    tiny_tokenizer.save(folder)
    return folder


def run(capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()
    code = _run(list(map(str, arguments)))
    return code, *capsys.readouterr()


def test_convert_says_what_it_wrote_and_verified(model, tmp_path, capsys):
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "out")
    assert code == 0
    first, *checks = out.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: ") and "parameters at 16.00 bits each (float16)" in first
    assert checks[0] == "tensors: equal, to the bit" and len(checks) == 5
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "out.gguf", "--type", "q8_0", "--json")
    report = json.loads(out)
    assert code == 0 and report["dtype"] == "Q8_0" and report["checks"][0]["result"] == "within rounding"
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "quick", "--no-verify", "--dtype", "bfloat16")
    assert code == 0 and out.splitlines()[1:] == ["not verified"] and "(bfloat16)" in out


def test_options_without_an_effect_are_wrong_usage(model, tmp_path, capsys):
    for out, options in (
        ("out", ["--type", "f16"]), ("out.bin", ["--type", "f16"]), ("out.gguf", ["--dtype", "float16"]),
        ("out.bin", ["--dtype", "float16"]),
    ):  # fmt: skip
        code, _, err = run(capsys, "convert", model, "--out", tmp_path / out, *options)
        assert code == 2 and "would have no effect" in err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_output_that_exists_is_refused_before_any_work(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlxlm.convert.open_checkpoint", lambda source: 1 / 0)
    code, out, err = run(capsys, "convert", model, "--out", model)
    assert code == 1 and out == "" and f"{model} already exists (try: another name for the output)" in err


def test_inspect(model, capsys):
    code, out, err = run(capsys, "inspect", model)
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and err == ""
    assert shown["layers"] == "2, width 64" and shown["types"].startswith("F16 ")
    assert "4 heads of 16 on 2 key-value heads" in shown["attention"] and "run by mlxlm's own" in shown["family"]
    code, out, _ = run(capsys, "inspect", model, "--json", "--tensors")
    facts = json.loads(out)
    assert facts["bits_per_weight"] == 16 and facts["quantization"] is None
    assert {"name": "model.norm.weight", "type": "F16", "shape": "64", "bytes": 128} in facts["tensor_list"]


def test_inspect_obeys_nothing_that_a_file_says(model, capsys):
    values = json.loads((model / "config.json").read_text())
    plan = {"bits": 0, "mode": "affine", "x\x1b[2J": {"bits": "y"}}
    write_json(model / "config.json", {**values, "model_type": "\x1b[31mmamba\nerror", "quantization": plan})
    code, out, _ = run(capsys, "inspect", model)
    assert code == 0 and "\x1b" not in out and "\\x1b[31mmamba error, run by mlx_lm" in out


def test_inspect_says_why_mlx_lm_runs_a_model(model, capsys):
    values = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", {**values, "model_type": "mamba"})
    code, out, _ = run(capsys, "inspect", model)
    assert code == 0 and "mamba, run by mlx_lm: " in out


def test_compare(model, tmp_path, capsys):
    assert run(capsys, "convert", model, "--out", tmp_path / "q4.gguf", "--type", "q4_0")[0] == 0
    code, out, _ = run(capsys, "compare", model, tmp_path / "q4.gguf", "--tokens", "200")
    assert code == 0
    assert out.startswith("KL ") and "top-1 agreement" in out and "worst layers model." in out
    assert "bits per weight" in out and "largest errors, weights" in out
    (tmp_path / "text.txt").write_text("the cat sat on a mat " * 20)
    code, out, _ = run(capsys, "compare", model, model, "--json", "--text", tmp_path / "text.txt")
    found = json.loads(out)
    assert code == 0 and found["identical"] and found["kl"] == 0 and found["weights"]["only_a"] == []
    code, out, _ = run(capsys, "compare", model, model, "--text", tmp_path / "text.txt")
    assert out.startswith("identical: ")


def test_compare_needs_one_tokenizer(model, tmp_path, make_text, capsys):
    from mlxlm.tokenizer import train

    assert run(capsys, "convert", model, "--out", tmp_path / "other", "--no-verify")[0] == 0
    train([make_text(3000).upper()], 300).save(tmp_path / "other")
    code, _, err = run(capsys, "compare", model, tmp_path / "other")
    assert code == 1 and "make other tokens of the same text" in err
