"""Whole commands on a simulated GPU, with every operation on the kernels that support it."""

import json
import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest

from mlxlm.doctor.check import run_check
from mlxlm.doctor.decoding_checks import DecodingChecks
from mlxlm.doctor.facts import basic_facts, report_facts
from mlxlm.doctor.kernel_checks import kernel_checks
from mlxlm.doctor.sizes import GPU
from mlxlm.experiments import receipt
from mlxlm.kernels import dispatch
from tests.doctor.tiny import TINY
from tests.paths import ROOT
from tests.run_command import run_command
from tests.stand_ins import serve

SIZES = ["--preset", "0.3m", "--vocab-size", "300", "--set", "head_dim=32", "--max-seq-length", "64"]
TRAINING = [*SIZES, "--batch-size", "2", "--warmup-steps", "1", "--eval-every", "4", "--save-every", "3"]
CHAT = ["--max-tokens", "24", "--max-kv-size", "64", "--kv-bits", "4", "--temperature", "0"]


@pytest.fixture(autouse=True)
def on_kernels(simulated_gpu, monkeypatch):
    """The mode "metal", on Metal, in this process and in its children."""
    if simulated_gpu.device.backend == "metal":
        monkeypatch.setenv(dispatch.VARIABLE, "metal")
        monkeypatch.setattr(dispatch, "_environment", "metal")
    simulated_gpu.launches.clear()


def succeed(*arguments):
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def expect_launches(gpu, *kernels):
    assert gpu.device.backend != "metal" or set(kernels) <= set(gpu.launches)


def losses(run):
    entries = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def test_interrupted_training_in_bfloat16_resumes_bit_equal(simulated_gpu, folder, tmp_path, monkeypatch):
    """After a failed command buffer, as when the memory is full."""
    run = tmp_path / "run"
    pretrain = ["pretrain", folder / "stories.txt", "--out", run, *TRAINING, "--steps", "6"]
    for _ in range(2):  # the first checks the kernels, which takes evaluations, too
        shutil.rmtree(run, ignore_errors=True)
        simulated_gpu.faults.clear()
        succeed(*pretrain)
    expect_launches(
        simulated_gpu, "rms_norm", "rms_norm_grad", "add_rms_norm",
        "attention_forward", "attention_grad_query", "attention_grad_key_value",
    )  # fmt: skip
    assert json.loads((run / "train.json").read_text())["settings"]["dtype"] == "bfloat16"
    expected, evaluations = (losses(run), (run / "model.safetensors").read_bytes()), simulated_gpu.faults.evaluations
    shutil.rmtree(run)
    simulated_gpu.faults.failing_evaluations = {evaluations // 3}
    monkeypatch.setattr(os, "execve", lambda *_: sys.exit("the new process is killed"))
    assert run_command(*pretrain).returncode == "the new process is killed"
    simulated_gpu.faults.clear()
    assert 0 < len(losses(run)) < 6
    succeed("pretrain", "--resume", run)
    assert (losses(run), (run / "model.safetensors").read_bytes()) == expected


def test_quantized_model_answers_with_a_quantized_rotating_cache(simulated_gpu, folder, tmp_path):
    options = ["--method", "rtn", "--group-size", "32", "--no-evaluate"]
    succeed("quantize", folder / "my-model", "--out", tmp_path / "4bit", *options)
    simulated_gpu.launches.clear()
    question = "Where did the cat sit? And the two birds? " * 4  # longer than the cache
    answer = succeed("chat", tmp_path / "4bit", *CHAT, "-p", question)
    assert answer.strip()
    expect_launches(simulated_gpu, "attention_decode_quantized")
    assert succeed("chat", tmp_path / "4bit", *CHAT, "-p", question) == answer


def test_generation_launches_the_decode_kernels(simulated_gpu, folder):
    succeed("generate", folder / "my-model", "-p", "The cat sat on a mat. " * 60, "-n", "8")
    expect_launches(simulated_gpu, "rms_norm", "attention_decode", "attention_forward")


def test_server_in_a_child_process(folder):
    question = {"messages": [{"role": "user", "content": "Where did the cat sit?"}], "max_tokens": 8, "temperature": 0}
    with serve(folder / "my-model") as address:
        answers = [httpx.post(f"http://{address}/v1/chat/completions", json=question, timeout=60) for _ in range(2)]
        health = httpx.get(f"http://{address}/metrics", timeout=60).text
    texts = [answer.raise_for_status().json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] and re.search(r"tokens_total\S* [1-9]", health)


def test_kernels_of_a_model_are_those_of_its_stored_dtype(folder):
    assert re.search(r"^decode_attention +float32", succeed("kernels", "list", folder / "my-model"), re.MULTILINE)


def test_facts_name_the_device(simulated_gpu):
    """For `doctor --full` and for the receipt of a training run."""
    facts = report_facts()
    assert basic_facts()["device"] == facts["device"] == f"GPU ({simulated_gpu.device.name})"
    assert facts["working_set_bytes"] == (simulated_gpu.device.working_set or simulated_gpu.device.memory)
    assert receipt.environment()["device"] == "GPU"
    first_check = next(iter(kernel_checks(GPU)))
    assert (first_check.name == "Metal kernels") == (simulated_gpu.device.backend == "cuda")  # skipped, with a reason


def test_doctor_measures_quantized_weights():
    (check,) = (check for check in DecodingChecks(TINY) if check.name == "speed, 4-bit weights")
    assert run_check(check).values["tokens_per_second"] > 0


def test_child_processes_simulate_the_same_device(simulated_gpu, tmp_path):
    command = [sys.executable, ROOT / "cli.py", "doctor", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert report["device"] == f"GPU ({simulated_gpu.device.name})"
