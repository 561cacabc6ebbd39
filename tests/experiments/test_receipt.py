"""Receipts: training again gives the same bits, and what differs is named."""

import json
import shutil

import pytest

from mlxlm.cli.main import _run
from mlxlm.experiments.receipt import Receipt, Recipe, _compare_losses
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


def results(receipt, run):
    shutil.rmtree(run.path / "4bit", ignore_errors=True)
    return {comparison.name: comparison.result for comparison in receipt.compare(run)}


def test_training_again_gives_the_same_bits(receipt, again):
    assert receipt.results["steps"] == len(receipt.results["losses"]) == STEPS
    names = "corpus", "tokenizer and tokens", "losses", "weights", "quantized model"
    assert results(receipt, again) == dict.fromkeys(names, "equal")


def test_another_rounding_is_close(receipt, again):
    receipt.results["losses"][2] += 1e-4
    receipt.results["weights_sha256"] = receipt.results["quantized_sha256"] = "0" * 64
    receipt.results["bits_per_byte"] *= 1.01
    found = results(receipt, again)
    assert [found[name] for name in ("corpus", "losses", "weights", "quantized model")] == ["equal"] + ["close"] * 3


@pytest.mark.parametrize("planted", ["losses", "loss is nan", "weights", "corpus", "data"])
def test_a_wrong_result_is_different(receipt, again, planted):
    values = receipt.results
    values["corpus_sha256" if planted == "corpus" else "data_digest" if planted == "data" else "weights_sha256"] = "0"
    if planted.startswith("loss"):
        values["losses"][STEPS - 1] += 0.005 if planted == "losses" else float("nan")
    values["bits_per_byte"] *= 1.5 if planted == "weights" else 1
    found = results(receipt, again)
    wrong = {"loss is nan": "losses", "data": "tokenizer and tokens"}.get(planted, planted)
    assert {name for name, result in found.items() if result == "different"} == {wrong}


def test_losses_are_compared_up_to_the_last_step_that_was_trained(receipt, tmp_path):
    run = RECIPE.start(tmp_path)
    receipt.results["losses"][2] += 1e-7
    assert results(receipt, run)["losses"] == "different"  # no step was trained
    list(train(run, load(run.path), should_stop=lambda: run.log_file.read_text().count('"step", "step"') >= 3))
    [losses] = [comparison for comparison in receipt.compare(run) if comparison.name == "losses"]
    assert losses.result == "close" and losses.detail.startswith("from step 3 of")


def test_later_losses_may_differ_more():
    expected = [5.0] * 30
    assert _compare_losses([*expected[:25], *[5.05] * 5], expected).result == "close"
    assert _compare_losses([*expected[:19], 5.05, *expected[20:]], expected).result == "different"
    assert _compare_losses([*expected[:25], *[5.5] * 5], expected).result == "different"


def test_the_command(model, tmp_path, capsys):
    assert _run(["models", "verify", str(model), "--steps", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "losses: equal, of the first 2 steps"
    assert _run(["models", "verify", str(model), "--all", "--out", str(tmp_path / "kept")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("quantized model: equal, ")
    assert (tmp_path / "kept/run/train.json").exists()


@pytest.mark.parametrize(("difference", "code"), [(1e-5, 0), (0.5, 1)])
def test_the_command_fails_if_a_result_is_different(model, receipt, tmp_path, capsys, difference, code):
    values = receipt.to_dict()
    values["results"]["losses"][0] += difference
    values["results"]["environment"]["chip"] = "Z80"
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "receipt.json").write_text(json.dumps(values))
    assert _run(["models", "verify", str(tmp_path), "--steps", "1"]) == code
    out, err = capsys.readouterr()
    assert f"losses: {'different' if code else 'close'}, from step 1 of 1, by at most" in out and "there Z80" in err
    assert err.splitlines()[-1].startswith("error: different from the receipt: losses") is bool(code)


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
