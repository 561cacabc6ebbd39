"""The commands as a person meets them: what they print, where, and how they fail."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlxlm.cli.main import COMMANDS, _run
from tests.paths import ROOT

QUICK = ["--steps", "6", "--batch-size", "4", "--max-seq-length", "32", "--vocab-size", "300"]


def command(*args, **kwargs):
    """Run `mlxlm ARGS` in a process of its own, from another folder."""
    code = "from mlxlm.cli.main import main; main()"
    arguments = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, **kwargs)


@pytest.fixture
def run_folder(tmp_path, text_file):
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", "--out", str(tmp_path / "run"), *QUICK]) == 0
    return tmp_path / "run"


def fails(capsys, *args) -> str:
    """Exit code 1, nothing on stdout and exactly one line on stderr, which is returned."""
    capsys.readouterr()
    assert _run(list(map(str, args))) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


def test_help_imports_neither_mlx_nor_transformers_nor_rich():
    code = (
        "import sys\nfrom mlxlm.cli.main import _run\nassert _run(['--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'rich', 'numpy', 'tokenizers', 'matplotlib'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert _run([name, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_a_checkout_runs_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "presets"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "1m" in done.stdout and done.stderr == ""


def test_wrong_usage_is_exit_code_2(capsys):
    assert _run(["nonsense"]) == 2
    assert _run(["pretrain"]) == 2
    assert _run(["pretrain", "--resume", "x", "--steps", "3"]) == 2


def test_doctor_and_presets_print_json(capsys):
    assert _run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["matmul_gflops"] > 0 and facts["memory"] > 0 and facts["blas"]
    assert _run(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["5m"]["hidden_size"] == 256


def test_doctor_shows_a_gpus_own_memory(monkeypatch, capsys):
    from mlxlm.backend import mlx
    from mlxlm.plan import machines

    info = {"device_name": "a GPU", "total_memory": 24 << 30}
    monkeypatch.setattr(mlx, "ON_CPU", False)
    monkeypatch.setattr(mlx.mx, "device_info", lambda: info)
    monkeypatch.setattr(machines, "measure_matmul", lambda: 1.0)
    assert _run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["working_set"] == 24 << 30
    del info["total_memory"]
    assert _run(["doctor"]) == 0
    assert "working set              unknown" in capsys.readouterr().out


def test_from_text_to_a_continuation(tmp_path, run_folder, capsys):
    capsys.readouterr()
    assert _run(["quantize", str(run_folder), "--out", str(tmp_path / "small"), "--bits", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bits_per_weight"] < 6 and report["metrics"]["bits_per_byte_after"] > 0
    assert _run(["convert", str(run_folder), "--out", str(tmp_path / "plain"), "--no-verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
    assert _run(["compare", str(run_folder), str(tmp_path / "plain"), "--tokens", "64"]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    arguments = ["generate", str(tmp_path / "small"), "-p", "The cat", "--max-tokens", "5", "--seed", "1", "--json"]
    assert _run(arguments) == 0
    first = capsys.readouterr().out
    assert _run(arguments) == 0
    assert json.loads(first)["text"] == json.loads(capsys.readouterr().out)["text"]


def test_pretrain_prints_the_run_on_stdout_only(tmp_path, text_file):
    done = command("pretrain", text_file, "--preset", "0.3m", "--out", tmp_path / "run", *QUICK)
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'run'}\n"
    assert "bits per byte" in done.stderr and "\x1b" not in done.stderr


@pytest.fixture
def start():
    """Commands in processes of their own, which end with the test."""
    started = []

    def run(*arguments, **kwargs):
        command = [sys.executable, "-c", "from mlxlm.cli.main import main; main()", *map(str, arguments)]
        started.append(
            subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True, **kwargs
            )
        )
        return started[-1]

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def endless(text_file, out, steps=100_000):
    return ["pretrain", text_file, "--preset", "0.3m", "--out", out, *QUICK[2:], "--steps", steps]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, text_file, number, start):
    process = start(*endless(text_file, tmp_path / "my run"))
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    os.kill(process.pid, number)
    rest = process.stderr.read()
    assert process.wait(60) == 0
    assert len(list((tmp_path / "my run/checkpoints").iterdir())) == 1
    [resume] = [line for line in rest.splitlines() if line.startswith("mlxlm pretrain --resume")]
    assert shlex.split(resume)[1:] == ["pretrain", "--resume", str(tmp_path / "my run")]
    again = start(*shlex.split(resume)[1:])
    assert any(" to 100000 of " in line for line in again.stderr)
    again.send_signal(number)
    assert again.wait(60) in (0, 129, 130, 143)


def test_the_end_of_a_terminal_is_told_more_than_once(tmp_path, text_file, start):
    process = start(*endless(text_file, tmp_path / "run"))
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
        os.kill(process.pid, number)
        time.sleep(0.02)  # else two of the same are one
    rest = process.stderr.read()
    assert process.wait(60) == 0 and "--resume" in rest
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_callback_that_cant_raise_ends_the_command(tmp_path, number, code):
    (tmp_path / "victim.py").write_text(
        "import click, os, time, weakref\n"
        "class Thing: pass\n"
        "@click.command()\n"
        "def victim():\n"
        "    thing = Thing()\n"
        f"    watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), {number:d}))\n"
        "    del thing\n"
        "    time.sleep(60)\n"
    )
    run = "from mlxlm.cli import main; main.COMMANDS['victim'] = ('victim:victim', ''); main.main(['victim'])"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == code and "ignored" not in done.stderr


def dying_compiler(tmp_path, death):
    """The environment of a command that compiles everything anew, with a g++ that dies so the first time."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "bin").mkdir()
    compiler, died = tmp_path / "bin/g++", tmp_path / "died"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *.so*) [ -e {died} ] || {{ touch {died}; {death}; }} ;; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("what", ["evaluate", "generate"])
def test_a_compiler_that_dies_in_a_validation_or_an_answer(tmp_path, run_folder, text_file, what):
    arguments = [text_file] if what == "evaluate" else ["-p", "the", "-n", "3", "-t", "1", "--top-p", "0.9"]
    done = command(what, run_folder, *arguments, env=dying_compiler(tmp_path, "kill -INT $$"))
    assert (tmp_path / "died").exists() and done.returncode == 0 and done.stdout, done.stderr


def test_ctrl_c_while_the_first_step_compiles(tmp_path, text_file, start):
    """A terminal sends SIGINT to the compiler, too, which dies of it; the step must not."""
    few = endless(text_file, tmp_path / "run", steps=99)  # so few are not tried beforehand, which would compile them
    process = start(*few, env=dying_compiler(tmp_path, "kill -INT 0; sleep 60"))
    rest = process.stderr.read()
    assert process.wait(60) == 0 and (tmp_path / "died").exists(), rest
    assert "--resume" in rest and [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-1"]


def test_training_outlives_the_reader_of_its_messages(tmp_path, text_file, start):
    process = start(*endless(text_file, tmp_path / "run"))
    process.stderr.readline()
    process.stderr.close()
    log = tmp_path / "run/log.jsonl"
    while not (log.exists() and '"event": "step"' in log.read_text()) and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


@pytest.fixture(params=["a full disk", "no reader", "no terminal"])
def refuses(request):
    """A descriptor that can't be written to."""
    if request.param == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        ours = os.open("/dev/full", os.O_WRONLY)
    else:
        other, ours = os.pipe() if request.param == "no reader" else os.openpty()
        os.close(other)
    yield ours
    os.close(ours)


def test_messages_that_nobody_can_take_end_no_command(refuses):
    """Neither one in the middle of the work, nor that of the error at its end, nor what is left at the exit."""
    code = (
        "from mlxlm.cli import main, render\n"
        "def work(args):\n"
        "    render.say('x' * 10_000)\n"
        "    main.print_error(ValueError())\n"
        "    return 3\n"
        "main._run = work\n"
        "main.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=refuses, timeout=50).returncode == 3


@pytest.mark.parametrize("closed", ["<&-", "<&- 2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_standard_stream_that_is_closed(tmp_path, closed):
    code = (
        "import os, subprocess, sys\n"
        "from mlxlm.cli import main\n"
        "def work(args):\n"
        "    child = subprocess.run([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]'])\n"
        "    with open('opened', 'w') as file:\n"
        "        print(file.fileno(), child.returncode, file=file)\n"
        "    return 0\n"
        "main._run = work\n"
        "main.main()\n"
    )
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], cwd=tmp_path, timeout=50)
    number, child = (tmp_path / "opened").read_text().split()
    assert done.returncode == 0 and int(number) > 2 and child == "0"  # a child process has all three, too


def test_a_model_is_read_with_standard_input_closed(run_folder):
    arguments = [sys.executable, "from mlxlm.cli.main import main; main()", str(run_folder)]
    shell = ["bash", "-c", '"$0" -c "$1" generate "$2" -p the -n 3 -t 0 <&-', *arguments]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == command("generate", run_folder, "-p", "the", "-n", "3", "-t", "0").stdout


def test_a_warmup_needs_no_steps(text_file, tmp_path):
    few = ["--tokens", "400", "--batch-size", "2", "--max-seq-length", "32", "--vocab-size", "300"]
    out = str(tmp_path / "run")
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", "--out", out, *few, "--warmup-steps", "3"]) == 0
    too_many = ["--out", f"{out}2", *few, "--warmup-steps", "9"]
    assert _run(["pretrain", str(text_file), "--preset", "0.3m", *too_many]) == 1


def test_a_stop_in_the_last_step_of_a_run_ends_several(monkeypatch, capsys):
    """The run is finished, and what was asked for holds for those that would come."""
    from mlxlm.cli import training
    from mlxlm.train import Finished

    made = []

    def asked_too_late(run, _tokenizer, *, stop, **_options):
        stop.requested = True
        return Finished(1, 1.0, 1.0, 1.0, 1.0, 1, run)

    monkeypatch.setattr(training, "run_training", asked_too_late)
    monkeypatch.setattr(training, "is_finished", lambda run: False)
    runs = [(name, lambda name=name: made.append(name) or name) for name in ("one", "two")]
    assert training.train_sweep(runs, None, "the command") == [] and made == ["one"]
    assert capsys.readouterr().err.splitlines()[-2:] == ["Continue with:", "the command"]


def test_options_without_an_effect_are_wrong_usage(text_file, tmp_path, capsys):
    for idle in (
        ["--sample-prompt", "x"], ["--decay-fraction", "0.3"], ["--tokenizer", "t", "--vocab-size", "9"],
        ["--validation", "v", "--validation-fraction", "0.1"], ["--preset", "1m", "--config", "c"],
    ):  # fmt: skip
        assert _run(["pretrain", str(text_file), "--out", str(tmp_path / "run"), *idle]) == 2
        assert "would have no effect" in capsys.readouterr().err


@pytest.fixture
def hasty(tmp_path, monkeypatch):
    """Training that is over after a step, in an empty folder."""
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 0.06)  # too little to learn anything
    for least in ("_LEAST_TOKENS", "_LEAST_STEPS"):
        monkeypatch.setattr(f"mlxlm.train.budget.{least}", 0)
    monkeypatch.setattr("mlxlm.quantize.speed.SECONDS", 0.0)  # of measuring speed
    monkeypatch.setattr("mlxlm.quantize.check._SLOW", 0)  # no waiting for mlx_lm
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("hasty")
def test_quickstart_on_a_file_and_without_one(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setattr("mlxlm.cli.quickstart.VOCAB_SIZE", 300)
    monkeypatch.setattr("mlxlm.cli.quickstart.PRESET", "0.3m")
    text_file.write_text(text_file.read_text() * 6)
    for arguments, name in (([str(text_file)], "mlxlm-quickstart"), ([], "mlxlm-quickstart-2")):
        assert _run(["quickstart", *arguments, "--minutes", "0.001"]) == 0
        out, err = capsys.readouterr()
        assert out.endswith("\n") and f"mlxlm chat {name}/4bit" in err and "bits per byte" in err
        assert (tmp_path / name / "4bit/model.safetensors").exists()


@pytest.mark.usefixtures("hasty")
def test_quickstart_on_simple_text(tmp_path):
    """Of few words: it supports fewer tokens than the default."""
    (tmp_path / "simple.txt").write_text("The cat sat on the mat.\n" * 2000)
    assert _run(["quickstart", "simple.txt", "--minutes", "0.001"]) == 0
    config = json.loads((tmp_path / "mlxlm-quickstart/4bit/config.json").read_text())
    assert 263 < config["vocab_size"] < 300


@pytest.mark.parametrize(
    "text, said",
    [("", "is empty"), ("Hello there.\n", "13 characters are too few"), ("The cat sat. " * 80, "are too few to learn"),
     ("a" * 30_000, "less than one sequence of 512 (try: more text"), ("\n" * 30_000, "no text to train a tokeniz")],
)  # fmt: skip
@pytest.mark.usefixtures("hasty")
def test_quickstart_on_too_little_text(text, said, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text)
    line = fails(capsys, "quickstart", "text.txt", "--minutes", "0.001")
    assert said in line and "--" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_the_vocabulary_of_a_preset_adapts_to_the_text(tmp_path, capsys):
    text, out = tmp_path / "simple.txt", tmp_path / "run"
    text.write_text("The cat sat on the mat.\n" * 200)
    short = [text, "--preset", "0.3m", "--steps", "1", "--batch-size", "1", "--max-seq-length", "16"]
    assert _run(["pretrain", *map(str, short), "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["vocab_size"] < 300
    capsys.readouterr()
    line = fails(capsys, "pretrain", *short, "--out", tmp_path / "other", "--vocab-size", "2000")
    assert "a vocabulary of 2000 is larger than this text supports" in line


def test_bad_text(tmp_path, capsys):
    files = {"empty.txt": b"", "binary.bin": bytes(range(256)) * 10, "short.txt": b"hello there", "bad.jsonl": b"{"}
    expected = {"empty.txt": "is empty", "binary.bin": "not UTF-8", "short.txt": "try:", "bad.jsonl": "line 1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        line = fails(capsys, "pretrain", tmp_path / name, "--out", tmp_path / "run", *QUICK)
        assert expected[name] in line and "(try: " in line
        assert not (tmp_path / "run").exists()
    assert "no such file" in fails(capsys, "pretrain", tmp_path / "none.txt", "--out", tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files)


def test_a_vocabulary_larger_than_the_text_supports(tmp_path, make_text, capsys):
    (tmp_path / "text.txt").write_text(make_text(300))
    line = fails(capsys, "pretrain", tmp_path / "text.txt", "--out", tmp_path / "run", "--vocab-size", "50000")
    assert "50000" in line and "(try: " in line


def test_bad_models_and_places(tmp_path, text_file, run_folder, capsys):
    line = fails(capsys, "pretrain", text_file, "--preset", "9b", "--out", tmp_path / "x")
    assert "no preset '9b'" in line and "one of 0.3m" in line
    sizes = {"model_type": "llama", "hidden_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    line = fails(capsys, "pretrain", text_file, "--config", tmp_path / "config.json", "--out", tmp_path / "x")
    assert "missing intermediate_size, vocab_size" in line
    line = fails(capsys, "pretrain", text_file, "--out", run_folder, *QUICK)
    assert "already exists" in line and f"--resume {run_folder}" in line
    line = fails(capsys, "pretrain", text_file, "--out", text_file / "run", *QUICK)
    assert "a path whose parent is a folder" in line
    assert "there is no model folder" in fails(capsys, "generate", tmp_path / "none", "-p", "x")
    assert "there is no model folder" in fails(capsys, "convert", tmp_path / "none", "--out", tmp_path / "y")
    assert "is not a run" in fails(capsys, "pretrain", "--resume", tmp_path)
    line = fails(capsys, "generate", run_folder, "-p", "The cat sat. " * 2000)
    assert "context of 32 " in line and "(try: " in line
    checkpoint = next((run_folder / "checkpoints").iterdir()) / "model.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    assert "model.safetensors is truncated" in fails(capsys, "generate", run_folder, "-p", "x")


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert _run(["generate", str(tmp_path / "none"), "-p", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(tmp_path):
    code = "from mlxlm.cli.main import main; main()"
    done = subprocess.run(
        f'"{sys.executable}" -c "{code}" presets | true', shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
