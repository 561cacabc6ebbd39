"""Receipts: training again gives the same bits, and what differs is named. Speedruns, which end with a receipt."""

import itertools
import json
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mlxlm.train
from mlxlm.backend.mlx import ON_CPU
from mlxlm.cli import speedrun
from mlxlm.cli.main import _run
from mlxlm.data.small_world import corpus
from mlxlm.experiments.receipt import SCORE, Receipt, Recipe, _compare_losses, _sha256
from mlxlm.families import config_to_hf, load_preset
from mlxlm.quantize import quantize
from mlxlm.tokenizer import load
from mlxlm.train import start, train
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.paths import ROOT
from tests.run_command import run as run_command

STEPS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG = load_preset("0.3m", vocab_size=300, **SIZES, num_key_value_heads=1)
SETTINGS = {"steps": STEPS, "batch_size": 2, "max_seq_length": 32, "packing": "best-fit", "document_mask": True}
RECIPE = Recipe(20_000, 3, config_to_hf(CONFIG), SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def few_questions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_HELD_OUT_QUESTIONS", 2)
        yield


def clock():
    """A clock that advances by a second whenever it is read: a minute of training is about a dozen steps."""
    return itertools.count().__next__


def train_all(run, **options):
    list(train(run, load(run.path), **options))
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A quantized model with its receipt."""
    folder = tmp_path_factory.mktemp("receipt")
    run = train_all(RECIPE.start(folder / "run"))
    quantize(run.path, folder / "model", bits=4, method="rtn")
    receipt = Receipt.of_run(run, folder / "model")
    (folder / "model/receipt.json").write_text(json.dumps(receipt.to_dict()))
    return folder / "model"


@pytest.fixture
def receipt(model):
    return Receipt.read(model / "receipt.json")


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    return train_all(RECIPE.start(tmp_path_factory.mktemp("again") / "run"))


def results(receipt, run):
    shutil.rmtree(run.path / "4bit", ignore_errors=True)
    return {comparison.name: comparison.result for comparison in receipt.compare(run)}


def test_training_again_gives_the_same_bits(receipt, again):
    assert receipt.results["steps"] == len(receipt.results["losses"]) == STEPS
    names = "corpus", "tokenizer and tokens", "losses", "weights", "held-out answers", "quantized model"
    assert results(receipt, again) == dict.fromkeys(names, "equal")


def test_another_rounding_is_close(receipt, again):
    receipt.results["losses"][2] += 1e-4
    receipt.results["weights_sha256"] = receipt.results["quantized_sha256"] = "0" * 64
    receipt.results["bits_per_byte"] *= 1.01
    receipt.results[SCORE] *= 1.01
    found = results(receipt, again)
    assert list(found.values()) == ["equal"] * 2 + ["close"] * 4


@pytest.mark.parametrize("planted", ["losses", "loss is nan", "weights", "held-out answers", "corpus", "data"])
def test_a_wrong_result_is_different(receipt, again, planted):
    values = receipt.results
    values[SCORE] *= 0.9 if planted == "held-out answers" else 1  # better than the same weights are
    changed = {"corpus": "corpus_sha256", "data": "data_digest", "held-out answers": "commit"}
    values[changed.get(planted, "weights_sha256")] = "0"
    if planted.startswith("loss"):
        values["losses"][STEPS - 1] += 0.005 if planted == "losses" else float("nan")
    values["bits_per_byte"] *= 1.5 if planted == "weights" else 1
    found = results(receipt, again)
    wrong = {"loss is nan": "losses", "data": "tokenizer and tokens"}.get(planted, planted)
    assert {name for name, result in found.items() if result == "different"} == {wrong}


def test_losses_are_compared_up_to_the_last_step_that_was_trained(receipt, tmp_path):
    run = RECIPE.start(tmp_path / "run")
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
    assert (tmp_path / "kept/train.json").exists()


@pytest.mark.skipif(not ON_CPU, reason="a GPU has bfloat16")
def test_a_receipt_of_a_gpu_is_verified_in_float32_on_a_cpu(receipt, tmp_path, capsys):
    recipe = replace(receipt.recipe, settings={**SETTINGS, "dtype": "bfloat16"})
    (tmp_path / "receipt.json").write_text(json.dumps(replace(receipt, recipe=recipe).to_dict()))
    assert _run(["models", "verify", str(tmp_path / "receipt.json"), "--steps", "2"]) == 0
    assert "float32" in capsys.readouterr().err


@pytest.mark.parametrize(("difference", "code"), [(1e-5, 0), (0.5, 1)])
def test_the_command_fails_if_a_result_is_different(model, receipt, tmp_path, capsys, difference, code):
    receipt.results["losses"][0] += difference
    receipt.results["environment"]["chip"] = "Z80"
    values = receipt.to_dict()
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
        lambda v: v["recipe"].update(num_bytes=10**12),
        lambda v: v["recipe"].update(extra=1),
        lambda v: v["recipe"].update(learning_rates=["1"]),
        lambda v: v["recipe"].update(config=None),
        lambda v: v["recipe"].update(tokenizer={"path": "/etc/passwd"}),
        lambda v: v["recipe"]["settings"].update(teacher="/etc"),
        lambda v: v["recipe"].update(minutes=3.0),
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
    if "recipe" in values:
        values["sha256"] = _sha256(values)
    (tmp_path / "receipt.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="receipt.json is not a receipt"):
        Receipt.read(tmp_path / "receipt.json")


@pytest.mark.parametrize("change", [{"recipe": {"seed": 4}}, {"results": {SCORE: 0.01}}])
def test_a_changed_receipt_is_refused(change, receipt, tmp_path):
    values = json.loads(json.dumps(receipt.to_dict()))
    [(part, changes)] = change.items()
    values[part].update(changes)
    (tmp_path / "receipt.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="receipt.json has been changed"):
        Receipt.read(tmp_path / "receipt.json")


def test_the_receipt_of_the_bundled_model_can_be_read():
    assert Receipt.read(ROOT / "models/small-world/receipt.json").recipe.num_bytes == 50_000_000


def test_a_run_with_a_time_limit_can_be_repeated_from_its_receipt_alone(tmp_path, monkeypatch):
    timed = replace(RECIPE, settings={"batch_size": 2, "max_seq_length": 32, "ema_decay": 0.5}, minutes=1.0)
    prepare_shards, monotonic, added = start.prepare_shards, time.monotonic, []

    def prepare_for_an_hour(*args):
        added.append(3600)
        return prepare_shards(*args)

    monkeypatch.setattr(start, "prepare_shards", prepare_for_an_hour)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(added))
    monkeypatch.setattr("mlxlm.train.budget.probe", lambda *_: SimpleNamespace(step=1e-3))  # on a busy machine, too
    run = timed.start(tmp_path / "run")
    monkeypatch.undo()
    assert 0 < run.settings.time_limit <= 60
    with pytest.raises(CheckpointError, match=r"hasn't finished .*mlxlm speedrun --resume"):
        Receipt.of_run(run)
    train_all(run, now=clock())
    (tmp_path / "receipt.json").write_text(json.dumps(Receipt.of_run(run).to_dict()))
    receipt = Receipt.read(tmp_path / "receipt.json")
    assert 5 < receipt.results["steps"] < 60 and len(set(receipt.recipe.learning_rates)) > 5
    shutil.rmtree(tmp_path / "run")
    again = train_all(receipt.recipe.start(tmp_path / "again"))
    assert set(results(receipt, again).values()) == {"equal"}
    assert Receipt.of_run(again).recipe == receipt.recipe  # also of the repetition


def test_speedrun(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "TRACKS", {"3": (1.0, 30_000), "10": (10.0, 30_000)})
    monkeypatch.setattr(mlxlm.train, "train", lambda *args, **options: train(*args, now=clock(), **options))
    run, receipt = tmp_path / "run", tmp_path / "run/receipt.json"
    overrides = [f"--set={name}={value}" for name, value in SIZES.items()]
    sizes = [
        "--preset",
        "0.3m",
        *overrides,
        "--set=num_key_value_heads=1",
        "--set=positions=learned",
        "--vocab-size",
        300,
    ]
    code, out, err = run_command("speedrun", "--out", run, *sizes, "--max-seq-length", "32", "--batch-size", 2)
    values = json.loads(receipt.read_text())
    line = out.splitlines()[-1]
    assert code == 0 and line.startswith(f"mlxlm speedrun, 1 min: {values['results'][SCORE]:.4f} bits per byte; ")
    assert line.endswith(f"receipt {values['sha256'][:12]}") and f"mlxlm models verify {receipt} --all" in err
    assert run_command("models", "verify", receipt, "--steps", 3)[1].endswith("losses: equal, of the first 3 steps\n")
    code, out, err = run_command("speedrun", "--resume", run)  # of a finished run: the same again
    assert code == 0 and out.splitlines()[-1] == line and "nothing was left to do" in err
    code, _, err = run_command("speedrun", "--resume", run, "--track", "10")
    assert code == 2 and "--track can't be given" in err
    (run / "recipe.json").unlink()
    code, _, err = run_command("speedrun", "--resume", run)
    assert code == 1 and "wasn't made by mlxlm speedrun" in err
