"""`mlxlm plan`."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.plan import Serving, bits_that_fit, find_config, inference_memory
from mlxlm.plan.advice import usable_memory
from tests.run_command import run as run_mlxlm


@pytest.fixture
def run(monkeypatch):
    """`run(*arguments)`: the exit code, standard output and standard error of `mlxlm plan`."""
    monkeypatch.setattr("mlxlm.plan.machines.measure_matmul", lambda **options: 100.0)
    return partial(run_mlxlm, "plan")


def test_tables(run):
    each = ("--num-devices", 16000, "--batch-size", 1)
    code, out, err = run("llama3-405b", "--machine", "h100", *each, "--tokens", "15.6e12")
    assert code == 0 and out.startswith("Training does not fit in the h100's 80 GB")
    assert "No change makes this model fit" in out and "406B" in out
    assert "a model FLOPs utilization of 40% is assumed" in err
    for text in ("feed forward", "cache, multi-query", "memory of 1 x 512 tokens on each device"):
        assert text in out


def test_other_sizes(run):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "kv_heads": 2, "vocab_size": 100}
    parts = {**sizes, "intermediate_size": 128, "head": "tied", "norm": "layer"}
    options = [word for name, value in parts.items() for word in ("--set", f"{name}={value}")]
    code, out, _ = run("1m", *options, "--machine", "a100", "--batch-size", 3, "--json")
    found = json.loads(out)
    assert code == 0 and found["training"]["batch_size"] == 3 and found["training"]["dtype"] == "bfloat16"
    head_dim = found["config"]["head_dim"]
    layer = 2 * 64 * 4 * head_dim + 2 * 64 * 2 * head_dim + 3 * 64 * 128
    assert found["parameters"]["total"] == 2 * layer + 100 * 64 + 5 * 2 * 64


def test_probe(run, monkeypatch):
    from mlxlm import train
    from mlxlm.plan import machines

    monkeypatch.setattr(train, "probe", lambda config, settings: train.Probe(9.0, 0.5, 0.0, 10**9))
    shape = ("0.3m", "--probe", "--batch-size", 2, "--max-seq-length", 32)
    code, out, _ = run(*shape)
    steps = [line.split() for line in out.splitlines() if line.startswith("per step ")]
    _, predicted, measured = steps  # the first one is FLOPs
    assert code == 0 and measured[2:4] == ["0.5", "s"] and float(predicted[2]) < 0.01
    assert "1 GB" in out and out.count("measured: the prediction was -") == 2
    found = json.loads(run(*shape, "--json")[1])
    step = found["flops"]["per_token"] * 64 / (0.4 * 100e9)
    assert found["duration"]["seconds_per_step"] == pytest.approx(step) and found["duration"]["mfu_source"] == "assumed"
    assert found["measured_duration"]["seconds_per_step"] == 0.5 and found["measured_memory"] == 10**9
    monkeypatch.setattr(machines, "measure_matmul", lambda **_: 1e-3)
    assert "other work slowed the machine" in run(*shape)[1]


def test_note_on_the_speed_of_another_dtype(run):
    remark = "the time is for bfloat16 products; float32 products"
    assert remark in run("1m", "--machine", "h100", "--dtype", "float32")[2]
    for machine in (("--machine", "h100"), ("--machine", "m1"), ("--flops", "1e12", "--dtype", "float32")):
        assert "products" not in run("1m", *machine)[2]


def test_memory_of_the_machine(run):
    out = run("1b", "--machine", "m4-max", "--bits", 4)[1]
    assert out.startswith("For what fits, say how much memory the machine has: --memory 48GB, 64GB or 128GB")
    assert re.search(r"speed +at most \d+ tokens/s +a step reads .*, at 546 GB/s", out)
    assert "fits in the m4-max's 36 GB" in run("1b", "--machine", "m4-max", "--memory", "36GB", "--batch-size", 1)[1]


@pytest.mark.skipif(not ON_CPU, reason="of a CPU")
def test_cpu_keeps_quantized_bits_and_no_others(run):
    _, out, err = run("0.3m", "--bits", 4, "--kv-bits", 16)
    assert "4-bit weights" in out and "become" not in err
    assert "a key-value cache of 16 bits has 32 bits" in err
    _, out, err = run("0.3m", "--bits", 16)
    assert "32-bit weights" in out and "16-bit weights become 32-bit weights" in err


@pytest.mark.skipif(not ON_CPU, reason="of a CPU")
def test_probe_of_bfloat16_on_a_cpu(run):
    code, _, err = run("1m", "--probe", "--dtype", "bfloat16")
    assert code == 1 and "a CPU computes bfloat16 products many times slower" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["1m", "--machine", "a100", "--flops", "1e12"], "give one"),
        (["1m", "--machine", "a100", "--probe"], "--probe measures this machine"),
        (["1m", "--machine", "a100", "--group-size", "32"], "--group-size would have no effect"),
        (["1m", "--text-column", "story"], "--text-column would have no effect"),
    ],
)
def test_options_without_effect(run, arguments, problem):
    code, out, err = run(*arguments)
    assert code == 2 and not out and problem in err


def test_wrong_values(run, tmp_path):
    (tmp_path / "empty.txt").touch()
    for arguments, problem in (
        (["1m", "--machine", "abacus"], "unknown machine 'abacus'"),
        (["1m", "--flops", "0"], "can't plan with"),
        (["1m", "--flops", "inf"], "can't plan with"),
        (["1m", "--flops", "1e-300", "--json"], "can't plan with"),
        (["1m", "--machine", "a100", "--ema-decay", "5"], "ema_decay is 5.0"),
        (["1m", "--machine", "a100", "--context-length", "99999999999999"], "from 1 to 1099511627775"),
        (["1m", "--machine", "a100", "--data", tmp_path / "empty.txt"], "empty.txt has no size"),
        (["1m", "--machine", "a100", "--tokens", "-5"], "tokens"),
    ):
        code, out, err = run(*arguments)
        assert code == 1 and not out and problem in err, err


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_quantized_folder_keeps_its_bits(run, tmp_path, name):
    from mlxlm.families import config_to_hf, load_preset

    values = {**config_to_hf(load_preset("1m")), name: {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    code, out, _ = run(tmp_path, "--machine", "a100", "--json", "--group-size", 32)
    assert code == 0 and json.loads(out)["serving"]["bits"] == 4
    assert json.loads(run(tmp_path / "config.json", "--machine", "a100", "--json")[1])["serving"]["bits"] == 4


@pytest.mark.parametrize(
    ("arguments", "expected", "unexpected"),
    [
        (
            ["llama-65b", "--machine", "a100"],
            ["No batch fits: one sequence of 512 tokens takes", "largest preset that fits is",
             "Inference does not fit: the 16-bit weights take 131 GB; --bits 6 would fit"],
            ["fits: 0", " 0 tokens"],
        ),
        (
            ["llama3-405b", "--machine", "a100"],
            ["no number of bits is small enough", "No change makes this model fit"],
            ["fits: 0", " 0 tokens"],
        ),
        (
            ["5m", "--machine", "h100", "--max-seq-length", 16_000_000],
            ["Longest sequence that fits at batch 16"],
            ["fits: 0", "preset: -"],
        ),
        (["1m", "--machine", "a100", "--batch-size", 10**8], ["Largest batch that fits: "], [" 0 tokens", "preset: -"]),
    ],
)  # fmt: skip
def test_messages_if_it_does_not_fit(run, arguments, expected, unexpected):
    code, out, _ = run(*arguments)
    assert code == 0 and all(text in out for text in expected) and not any(text in out for text in unexpected), out


def test_bits_that_fit():
    config, serving = find_config("llama-65b"), Serving()
    memory = 80 * 10**9

    def takes(bits):
        return inference_memory(config, replace(serving, bits=bits)).total

    assert bits_that_fit(config, serving, memory) == 6 and takes(6) <= usable_memory(memory) < takes(8)
