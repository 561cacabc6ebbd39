"""Exported folders: what mlx_lm and transformers make of them, and what the report says."""

import json

import pytest
from mlx.utils import tree_flatten

import mlxlm
from mlxlm._mlx import mx
from mlxlm.checkpoint import save_weights
from mlxlm.config import ModelConfig
from mlxlm.errors import CheckpointError, ConfigError
from mlxlm.export import export
from mlxlm.files import write_json
from mlxlm.model import Decoder
from mlxlm.tokenizer import load
from mlxlm.train import start_run, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer):
    """A run that has learnt a counting rhyme, so that greedy tokens are no coin tosses."""
    folder = tmp_path_factory.mktemp("trained")
    rhyme = "The cat sat on a mat and saw two birds in the old garden while rain fell.\n"
    (folder / "text.txt").write_text(rhyme * 400)
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=300, max_position_embeddings=128,
    )  # fmt: skip
    tiny_tokenizer.save(folder / "tokenizer")
    settings = {"steps": 300, "batch_size": 8, "sequence_length": 64, "learning_rate": 5e-3, "eval_every": 0}
    run = start_run(folder / "run", [folder / "text.txt"], config, tokenizer=folder / "tokenizer", settings=settings)
    for _ in train(run, load(run.path)):
        pass
    return run


def mlx_lm_tokens(folder, prompt: str, n: int) -> list[int]:
    """Greedy tokens of mlx_lm, which reads model and tokenizer by itself."""
    mlx_lm = pytest.importorskip("mlx_lm")
    from mlx_lm.generate import generate_step

    model, tokenizer = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)  # both compute alike, so that the files are what is compared
    return [int(token) for token, _ in generate_step(mx.array(tokenizer.encode(prompt)), model, max_tokens=n)]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_mlx_lm_continues_with_the_same_greedy_tokens(trained, tmp_path, bits):
    report = export(trained.path, tmp_path / "out", bits)
    ours = mlxlm.generate(mlxlm.load(tmp_path / "out"), "The cat", temperature=0, max_tokens=24)
    assert list(ours.tokens) == mlx_lm_tokens(tmp_path / "out", "The cat", 24)
    assert len(set(ours.tokens)) > 4
    assert report.bytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())


def test_transformers_opens_the_16_bit_folder(trained, tmp_path):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers")
    export(trained.path, tmp_path / "out", 16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("The cat", return_tensors="pt")
    theirs = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    ours = mlxlm.generate(mlxlm.load(tmp_path / "out"), "The cat", temperature=0, max_tokens=20)
    assert theirs.tolist() == list(ours.tokens)


def test_the_report_tells_what_it_cost(trained, tmp_path):
    reports = {bits: export(trained.path, tmp_path / str(bits), bits) for bits in (2, 4, 8, 16)}
    changes = {b: abs(r.bits_per_byte_after - r.bits_per_byte_before) for b, r in reports.items()}
    assert changes[16] < 1e-3 and changes[8] < 0.02 and changes[2] > changes[8]
    assert reports[16].bits_per_weight == pytest.approx(16)
    assert 4.5 < reports[4].bits_per_weight < 4.8 and reports[4].bytes < reports[16].bytes
    assert reports[4].regrouped == {f"model.layers.{i}.mlp.down_proj": 32 for i in range(2)}
    config = json.loads((tmp_path / "4/config.json").read_text())
    assert config["quantization"]["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 4}
    assert config["num_key_value_heads"] == 2 and config["head_dim"] == 16 and config["rope_theta"] == 10000


def write_model(folder, tokenizer, **sizes):
    config = ModelConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=300, **sizes
    )
    model = Decoder(config)
    model.initialize(0)
    folder.mkdir()
    write_json(folder / "config.json", config.to_dict())
    save_weights(folder, dict(tree_flatten(model.parameters())))
    tokenizer.save(folder)
    return model


def test_layers_left_out_are_listed_and_load_everywhere(tmp_path, tiny_tokenizer):
    write_model(tmp_path / "model", tiny_tokenizer)
    report = export(tmp_path / "model", tmp_path / "out", 4)
    assert report.skipped["model.layers.0.mlp.up_proj"] == 48
    assert "model.layers.0.mlp.down_proj" not in report.skipped
    assert report.bits_per_byte_after is None
    ours = mlxlm.generate(mlxlm.load(tmp_path / "out"), "The cat", temperature=0, max_tokens=8)
    assert list(ours.tokens) == mlx_lm_tokens(tmp_path / "out", "The cat", 8)


def test_what_can_not_be_exported(tmp_path, tiny_tokenizer, trained):
    model = write_model(tmp_path / "model", tiny_tokenizer)
    with pytest.raises(ConfigError, match="7 bits is not a format.*2, 3, 4"):
        export(tmp_path / "model", tmp_path / "out", 7)
    with pytest.raises(CheckpointError, match="already exists"):
        export(tmp_path / "model", tmp_path / "model", 4)
    export(tmp_path / "model", tmp_path / "out", 4)
    with pytest.raises(CheckpointError, match="quantized already"):
        export(tmp_path / "out", tmp_path / "again", 4)
    weights = dict(tree_flatten(model.parameters()))
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_weights(tmp_path / "model", weights)
    with pytest.raises(CheckpointError, match="model.norm.weight has values that 16 bits can't hold"):
        export(tmp_path / "model", tmp_path / "nan", 4)
    assert not (tmp_path / "nan").exists()
