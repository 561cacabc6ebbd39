"""`mlxlm upload`: which files, and the model card. That they arrive is tested in test_models.py."""

import json

from mlxlm.checkpoint.locations import QUANTIZATION_PLOT, best_checkpoint
from mlxlm.convert.model_card import is_generated, model_card
from mlxlm.convert.upload import model_files
from tests.cli.helpers import error_line
from tests.run_command import run


def test_a_quantized_folder(model, tmp_path, text_file):
    out = tmp_path / "4bit"
    options = ["--bits", 4, "--group-size", 32, "--eval-text", text_file]
    assert run("quantize", model, "--out", out, *options)[0] == 0
    report = json.loads((out / "quantization.json").read_text())
    card = run("upload", out, "me/small", "--card", "--license", "mit")[1]
    assert card.startswith("---\nlibrary_name: mlx\npipeline_tag: text-generation\nlicense: mit\ntags:")
    assert f"{report['metrics']['kl']:.4f} nats per token" in card and f"]({QUANTIZATION_PLOT})" in card
    assert f"{report['bits_per_weight']:.2f} bits per weight" in card and "base_model" not in card
    assert set(model_files(out)) == {path.name for path in out.iterdir()}
    assert "--bits 4 --group-size 32" in (out / "README.md").read_text() and is_generated(out)
    (out / "README.md").write_text((out / "README.md").read_text() + "A word of the user's.\n")
    assert not is_generated(out)
    (out / "quantization.json").write_text(json.dumps({**report, "source": "owner/model:Q8_0@main"}))
    assert "base_model: owner/model\nbase_model_relation: quantized\n" in model_card(out, "me/small")
    assert "--yes is needed without a terminal" in run("upload", out, "me/small")[2]


def test_a_run_is_its_best_checkpoint(run_folder):
    files = model_files(run_folder)
    assert files["model.safetensors"] == best_checkpoint(run_folder) / "model.safetensors"
    assert {"config.json", "tokenizer.json"} < set(files) and "train.json" not in files
    assert "## Training" in (card := model_card(run_folder, "me/run")) and "bits per byte" in card


def test_what_can_not_be_uploaded(model, tmp_path):
    assert "me is not an id of the hub (try: owner/name)" in run("upload", model, "me")[2]
    assert run("convert", model, "--out", tmp_path / "x.gguf", "--no-verify")[0] == 0
    assert set(model_files(tmp_path / "x.gguf")) == {"x.gguf"}
    assert "llama-cli -hf me/x" in model_card(tmp_path / "x.gguf", "me/x")
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert "mlxlm convert" in error_line("upload", model, "me/x")
