"""Receipts: training again gives the same bits, and what differs is named."""

import json

import pytest

from mlxlm.cli.main import _run
from mlxlm.experiments.receipt import Receipt, Recipe
from mlxlm.families import config_to_hf, load_preset
from mlxlm.quantize import quantize
from mlxlm.tokenizer import load
from mlxlm.train import train
from mlxlm.utils.errors import ConfigError

STEPS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG = load_preset("0.3m", vocab_size=300, **SIZES, num_key_value_heads=1)
SETTINGS = {"steps": STEPS, "batch_size": 2, "max_seq_length": 32, "packing": "best-fit", "document_mask": True}
RECIPE = Recipe(20_000, 3, config_to_hf(CONFIG), SETTINGS)


def train_all(run):
    list(train(run, load(run.path)))
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A quantized model with its receipt."""
    folder = tmp_path_factory.mktemp("receipt")
    run = train_all(RECIPE.start(folder))
    quantize(run.path, folder / "model", bits=4)
    receipt = Receipt.of_run(RECIPE, run, folder / "model", "0123abc")
    (folder / "model/receipt.json").write_text(json.dumps(receipt.to_dict()))
    return folder / "model"


@pytest.fixture
def receipt(model):
    return Receipt.read(model / "receipt.json")


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    return train_all(RECIPE.start(tmp_path_factory.mktemp("again")))


def test_training_again_gives_the_same_bits(receipt, again):
    assert receipt.results["steps"] == len(receipt.results["losses"]) == STEPS
    assert {c.name: c.equal for c in receipt.compare(again)} == {
        "corpus": True, "tokenizer and tokens": True, "losses": True, "weights": True, "quantized model": True,
    }  # fmt: skip


def test_another_loss_is_named_with_its_step(receipt, tmp_path):
    run = RECIPE.start(tmp_path)
    receipt.results["losses"][2] += 1e-7
    receipt.results["corpus_sha256"] = "0" * 64
    assert not {c.name: c.equal for c in receipt.compare(run)}["losses"]  # no step was trained
    events = train(run, load(run.path), should_stop=lambda: run.log_file.read_text().count('"step", "step"') >= 3)
    list(events)
    comparisons = {c.name: c for c in receipt.compare(run)}
    assert not comparisons["corpus"].equal and comparisons["tokenizer and tokens"].equal
    assert not comparisons["losses"].equal and comparisons["losses"].detail.startswith("from step 3 of")


def test_the_command(model, tmp_path, capsys):
    assert _run(["verify-receipt", str(model), "--steps", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "losses: equal, of the first 2 steps"
    assert _run(["verify-receipt", str(model), "--all", "--out", str(tmp_path / "kept")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "quantized model: equal, 4 bits"
    assert (tmp_path / "kept/run/train.json").exists()


@pytest.mark.parametrize("here", ["same machine", "another machine"])
def test_the_command_fails_if_the_losses_differ(here, model, receipt, tmp_path, capsys):
    values = receipt.to_dict()
    values["results"]["losses"][0] += 0.5
    if here == "another machine":
        values["results"]["environment"]["chip"] = "Z80"
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "receipt.json").write_text(json.dumps(values))
    assert _run(["verify-receipt", str(tmp_path), "--steps", "1"]) == 1
    out, err = capsys.readouterr()
    assert "losses: different, from step 1 of 1, by at most 0.5 nats" in out
    expected = (
        "as expected on another kind" if here == "another machine" else "although the machine is of the same kind"
    )
    assert expected in err.splitlines()[-1] and ("there Z80" in err) is (here == "another machine")


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("recipe"),
        lambda v: v["recipe"].update(num_bytes="many"),
        lambda v: v["recipe"].update(extra=1),
        lambda v: v["results"].update(losses=[]),
        lambda v: v["results"].update(losses=["1.0"]),
        lambda v: v["results"].update(steps=-1),
        lambda v: v["results"].pop("environment"),
        lambda v: v.update(results=[]),
    ],
)
def test_a_malformed_receipt_is_an_error_that_names_the_file(change, receipt, tmp_path):
    values = json.loads(json.dumps(receipt.to_dict()))
    change(values)
    (tmp_path / "receipt.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="receipt.json is not a receipt"):
        Receipt.read(tmp_path / "receipt.json")
