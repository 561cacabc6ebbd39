"""`mlxlm pretrain`: messages, signals, wrong input."""

import json
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.cli.main import _run
from tests.cli.helpers import MLXLM, QUICK, dying_compiler, error_line


def test_only_the_path_of_the_run_goes_to_stdout(tmp_path, text_file, capfd):
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", "--out", str(tmp_path / "run"), *QUICK]) == 0
    out, err = capfd.readouterr()
    assert out == f"{tmp_path / 'run'}\n"
    assert "bits per byte" in err and "\x1b" not in err


@pytest.fixture
def start():
    """Starts commands in processes of their own, which are killed at the end of the test."""
    processes = []

    def run(*arguments, **settings):
        command = [*MLXLM, *map(str, arguments)]
        streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        processes.append(subprocess.Popen(command, start_new_session=True, **streams, **settings))
        return processes[-1]

    yield run
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def endless_run(text_file, out, steps=100_000):
    """The arguments of a run that doesn't end by itself."""
    return ["pretrain", text_file, "--preset", "0.3m", "--out", out, *QUICK[2:], "--steps", steps]


def read_until(process, beginning):
    """Read messages up to the first line that begins with this."""
    assert any(line.startswith(beginning) for line in process.stderr)


def test_ctrl_c_saves_and_prints_the_command_that_continues(tmp_path, text_file, start):
    process = start(*endless_run(text_file, tmp_path / "my run"))
    read_until(process, "step 1/")
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert len(list((tmp_path / "my run/checkpoints").iterdir())) == 1
    [resume] = [line for line in rest.splitlines() if line.startswith("mlxlm pretrain --resume")]
    assert shlex.split(resume)[1:] == ["pretrain", "--resume", str(tmp_path / "my run")]
    again = start(*shlex.split(resume)[1:])
    assert any(" to 100000 of " in line for line in again.stderr)
    again.send_signal(signal.SIGINT)
    assert again.wait(60) == 130


def test_sigterm_saves_and_later_hangups_are_ignored(tmp_path, text_file, start):
    process = start(*endless_run(text_file, tmp_path / "run"))
    read_until(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    read_until(process, "SIGTERM: finishing")  # signals that arrive together are handled by number
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)  # otherwise two equal signals become one
    rest = process.stderr.read()
    assert process.wait(60) == 143 and "--resume" in rest
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


@pytest.mark.skipif(not ON_CPU, reason="MLX only starts a compiler on a CPU")
def test_ctrl_c_while_the_first_step_compiles(tmp_path, text_file, start):
    """A terminal sends SIGINT to the compiler too, which dies of it; the step must not."""
    few = endless_run(text_file, tmp_path / "run", steps=99)  # too few to time steps, which compiles them
    process = start(*few, env=dying_compiler(tmp_path, "kill -INT 0; sleep 5"))
    rest = process.stderr.read()
    assert process.wait(60) == 130 and (tmp_path / "died").exists(), rest
    assert "--resume" in rest and [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-1"]


def test_training_continues_without_a_reader_of_its_messages(tmp_path, text_file, start):
    process = start(*endless_run(text_file, tmp_path / "run"))
    process.stderr.readline()
    process.stderr.close()
    log = tmp_path / "run/log.jsonl"
    while not (log.exists() and '"event": "step"' in log.read_text()) and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


def test_a_warmup_without_steps(text_file, tmp_path):
    few = ["--tokens", "400", "--batch-size", "2", "--max-seq-length", "32", "--vocab-size", "300"]
    out = str(tmp_path / "run")
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", "--out", out, *few, "--warmup-steps", "3"]) == 0
    too_many = ["--out", f"{out}2", *few, "--warmup-steps", "9"]
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", *too_many]) == 1


def test_options_without_effect_are_wrong_usage(text_file, tmp_path, capsys):
    for unused in (
        "--sample-prompt x",
        "--decay-fraction 0.3",
        "--tokenizer t --vocab-size 9",
        "--validation v --validation-fraction 0.1",
        "--preset 1m --config c",
    ):
        assert _run(["pretrain", str(text_file), "--out", str(tmp_path / "run"), *unused.split()]) == 2
        assert "would have no effect" in capsys.readouterr().err


def test_the_vocabulary_adapts_to_the_text(tmp_path, capsys):
    text, out = tmp_path / "simple.txt", tmp_path / "run"
    text.write_text("The cat sat on the mat.\n" * 200)
    short = [text, "--preset", "0.3m", "--steps", "1", "--batch-size", "1", "--max-seq-length", "16"]
    assert _run(["pretrain", *map(str, short), "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["vocab_size"] < 300
    capsys.readouterr()
    line = error_line("pretrain", *short, "--out", tmp_path / "other", "--vocab-size", "2000")
    assert "a vocabulary of 2000 is larger than this text supports" in line


def test_wrong_text_files(tmp_path):
    files = {"empty.txt": b"", "binary.bin": bytes(range(256)) * 10, "short.txt": b"hello there", "bad.jsonl": b"{"}
    expected = {"empty.txt": "is empty", "binary.bin": "not UTF-8", "short.txt": "try:", "bad.jsonl": "line 1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        line = error_line("pretrain", tmp_path / name, "--out", tmp_path / "run", *QUICK)
        assert expected[name] in line and "(try: " in line
        assert not (tmp_path / "run").exists()
    assert "no such file" in error_line("pretrain", tmp_path / "none.txt", "--out", tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files)


def test_a_vocabulary_that_is_too_large(tmp_path, make_text):
    (tmp_path / "text.txt").write_text(make_text(300))
    line = error_line("pretrain", tmp_path / "text.txt", "--out", tmp_path / "run", "--vocab-size", "50000")
    assert "50000" in line and "(try: " in line
