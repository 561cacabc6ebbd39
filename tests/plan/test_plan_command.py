"""`mlxlm plan`."""

import json

import pytest

from mlxlm.cli.main import main


@pytest.fixture
def run(capfdbinary):
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["plan", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return stop.value.code, out.decode(), err.decode()

    return call


def test_tables(run):
    code, out, err = run("llama3-405b", "--machine", "h100", "--devices", 16000, "--tokens", "15.6e12")
    assert code == 0 and "406B" in out and "training does not fit into the 80 GB of h100" in out
    assert "a utilisation of 40 % is assumed" in err
    for line in ("feed forward", "cache, multi-query", "20Φ", "12lh²", "it fits with preset"):
        assert line in out


def test_json_of_sizes_without_a_name(run):
    code, out, _ = run(
        "--hidden", 64, "--layers", 2, "--heads", 4, "--kv-heads", 2, "--intermediate", 128, "--vocab", 100,
        "--tied", "--machine", "a100", "--set", "norm=layer", "--batch-size", 3, "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["training"]["batch_size"] == 3 and found["training"]["dtype"] == "bfloat16"
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert found["parameters"]["total"] == 2 * layer + 100 * 64 + 5 * 2 * 64


def test_a_probe_shows_predicted_beside_measured(run):
    code, out, _ = run("0.3m", "--probe", "--batch-size", 2, "--sequence-length", 32)
    assert code == 0 and "measured: the prediction was" in out and "measured, of what is measured" in out


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(run, tmp_path, kind):
    path = tmp_path / f"plan.{kind}"
    assert run("1m", "--machine", "a100", "--picture", path)[0] == 0
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<svg" in start or b"<?xml" in start


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["1m", "--hidden", "8"], "--hidden would have no effect"),
        (["1m", "--tied"], "--tied would have no effect"),
        (["--hidden", "8"], "--layers, --heads missing"),
        (["1m", "--machine", "a100", "--flops", "1e12"], "give one"),
        (["1m", "--machine", "a100", "--probe"], "--probe measures this machine"),
        (["1m", "--probe", "--attention", "plain"], "--attention is for plans"),
    ],
)
def test_options_without_effect_are_refused(run, arguments, problem):
    code, out, err = run(*arguments)
    assert code == 2 and not out and problem in err


def test_wrong_values(run, tmp_path):
    for arguments, problem in (
        (["1m", "--machine", "abacus"], "there is no machine 'abacus'"),
        (["1m", "--machine", "a100", "--picture", tmp_path / "plan.gif"], "no kind of picture"),
        (["1m", "--flops", "0"], "can't be planned with"),
        (["1m", "--machine", "a100", "--tokens", "-5"], "tokens"),
    ):
        code, out, err = run(*arguments)
        assert code == 1 and not out and problem in err, err


def test_models_by_path(run, tmp_path):
    from mlxlm.config import ModelConfig

    path = tmp_path / "config.json"
    path.write_text(json.dumps(ModelConfig.preset("1m").to_dict()))
    totals = [
        json.loads(run(source, "--machine", "a100", "--json")[1])["parameters"]["total"]
        for source in ("1m", path, tmp_path)
    ]
    assert totals == [ModelConfig.preset("1m").parameter_count()] * 3
