"""The command line as a whole: help, exit codes, streams, signals, errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.cli import render, suggestions
from mlxlm.cli.main import COMMANDS, GROUPS, _run, _show_warning, app
from tests.cli.helpers import QUICK, dying_compiler, error_line, run_process
from tests.paths import ROOT


def test_help_imports_no_heavy_library():
    code = (
        "import sys\nfrom mlxlm.cli.main import _run\nassert _run(['--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'rich', 'numpy', 'tokenizers', 'matplotlib'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert name in done.stdout


def test_a_checkout_runs_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "models", "presets"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert "1m" in done.stdout and done.stderr == ""


def test_the_help_lists_every_command_on_one_line_of_80_columns(capsys):
    assert _run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for group, commands in GROUPS.items():
        start = lines.index(f"{group}:") + 1
        assert [" ".join(line.split()) for line in lines[start : start + len(commands)]] == [
            f"{name} {text}" for name, text in commands.items()
        ]


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("chatt", "no command chatt (try: mlxlm chat)"),
        ("Quantise", "(try: mlxlm quantize)"),
        ("train", "(try: mlxlm pretrain, or finetune)"),
        ("pull", "(try: mlxlm models pull)"),
        ("serv", "(try: mlxlm serve)"),
        ("lss", "(try: mlxlm models list)"),
        ("xyzzy", "error: no command xyzzy\n"),
        ("models lst", "no command lst (try: mlxlm models list)"),
        ("chat --temprature 1", "no option --temprature (try: --temperature)"),
        ("chat --ctx 1", "(try: --max-kv-size)"),
        ("pretrain --ctx 1", "(try: --max-seq-length)"),
        ("pretrain --lr 1", "(try: --learning-rate)"),
        ("pretrain -o x", "(try: --out)"),
        ("generate --max_tokens 3", "(try: --max-tokens)"),
        ("pretrain --max_iters 3", "(try: --steps)"),
        ("generate --model x", "(try: MODEL)"),
        ("evaluate --context_length 3", "(try: --context-length)"),
        ("chat --modle x", "(try: MODEL)"),
        ("convert a --out b.gguf --dtype q4_k_s", "q4_0 or q3_k_m or q2_k or mlxlm quantize --bits 4)"),
        ("convert a --q4", "no option --q4 (try: mlxlm quantize --bits 4)"),
        ("quantize a --4bit", "no option --4bit (try: --bits 4)"),
        ("quantize a --bits int8", "(try: --bits 8)"),
        ("evaluate a b.txt --multiple-choice", "--multiple-choice needs a value (try: --multiple-choice FILE)"),
        ("finetune a b.jsonl", "error: --out is missing (try: mlxlm finetune MODEL DATA --out RUN, or --resume RUN)"),
        ("finetune a --out b", "error: DATA is missing"),
        ("finetune a.jsonl --out b", "error: MODEL is missing"),
        ("finetune", "error: MODEL, DATA and --out are missing"),
        ("pretrain a.txt", "error: --out is missing"),
        ("finetune --resume a --beta 1", "--beta can't be given (try: mlxlm finetune --resume a; or another --out)"),
        ("pretrain a.txt --resume b", "DATA can't be given (try: mlxlm pretrain --resume b; or another --out)"),
        ("convert a --quiet", "error: no option --quiet\n"),
        ("models --output x", "error: no option --output\n"),
    ],
)
def test_a_mistyped_or_foreign_name_gets_a_suggestion(capsys, typed, suggestion):
    assert _run(typed.split()) == 2
    out, err = capsys.readouterr()
    assert not out and suggestion in err and err.startswith("Usage: mlxlm") and "Error" not in err


def test_every_foreign_name_leads_to_an_existing_one():
    commands = {name: app.get_command(None, name) for name in COMMANDS}
    for target in suggestions._FOREIGN_COMMANDS.values():
        for words in map(str.split, target.split(", or ")):
            if not words[0].startswith("--"):
                assert words[0] in commands and set(words[1:]) <= set(getattr(commands[words[0]], "commands", ()))
    leaves = [leaf for c in commands.values() for leaf in getattr(c, "commands", {"": c}).values()]
    ours = {name for leaf in leaves for name in suggestions._names(leaf)}
    assert set(suggestions._FOREIGN_OPTIONS) <= ours


def test_a_closed_terminal_leaves_no_partial_files(tmp_path):
    script = (
        "import click, os, signal, sys\n"
        "from mlxlm.cli import main\n"
        "from mlxlm.utils import files\n"
        "remove = files._remove\n"
        "files._remove = lambda path: (os.kill(os.getpid(), signal.SIGHUP), remove(path))\n"  # the second one
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "@click.command()\n"
        "def victim():\n"
        "    with files.atomic_new_folder('out') as folder:\n"
        "        (folder / 'weights').touch()\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "main.COMMANDS['victim'] = ''\n"
        "sys.modules['mlxlm.cli.victim'] = sys.modules['__main__']\n"
        "main.main(['victim'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (129, "", [])


@pytest.mark.skipif(not ON_CPU, reason="MLX only starts a compiler on a CPU")
@pytest.mark.parametrize("what", ["evaluate", "generate"])
def test_a_killed_compiler_ends_no_command(tmp_path, run_folder, text_file, what):
    arguments = [text_file] if what == "evaluate" else ["-p", "the", "-n", "3", "-t", "1", "--top-p", "0.9"]
    done = run_process(what, run_folder, *arguments, env=dying_compiler(tmp_path, "kill -INT $$"))
    assert (tmp_path / "died").exists() and done.returncode == 0 and done.stdout, done.stderr


@pytest.fixture(params=["a full disk", "no reader", "no terminal"])
def unwritable(request):
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


def test_unwritable_messages_end_no_command(unwritable):
    """Neither during the work, nor for the error at its end, nor at exit."""
    code = (
        "from mlxlm.cli import main, render\n"
        "def work(args):\n"
        "    render.say('x' * 10_000)\n"
        "    main.print_error(ValueError())\n"
        "    return 3\n"
        "main._run = work\n"
        "main.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=unwritable, timeout=50).returncode == 3


def test_wrong_models_and_paths(tmp_path, text_file, run_folder):
    line = error_line("pretrain", text_file, "--preset", "9b", "--out", tmp_path / "x")
    assert "no preset '9b'" in line and "one of 0.3m" in line
    sizes = {"model_type": "llama", "hidden_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    line = error_line("pretrain", text_file, "--config", tmp_path / "config.json", "--out", tmp_path / "x")
    assert "missing intermediate_size, vocab_size" in line
    line = error_line("pretrain", text_file, "--out", run_folder, *QUICK)
    assert "already exists" in line and f"--resume {run_folder}" in line
    line = error_line("pretrain", text_file, "--out", text_file / "run", *QUICK)
    assert "a path whose parent is a folder" in line
    assert "there is no model folder" in error_line("generate", tmp_path / "none", "-p", "x")
    assert "there is no model folder" in error_line("convert", tmp_path / "none", "--out", tmp_path / "y")
    assert "is not a run" in error_line("pretrain", "--resume", tmp_path)
    line = error_line("generate", run_folder, "-p", "The cat sat. " * 2000)
    assert "context length is 32 " in line and "(try: " in line
    damaged = tmp_path / "damaged"
    shutil.copytree(run_folder, damaged)
    checkpoint = next((damaged / "checkpoints").iterdir()) / "model.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    assert "copy or download the file again" in error_line("generate", damaged, "-p", "x")


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert _run(["generate", str(tmp_path / "none"), "-p", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly(tmp_path):
    done = subprocess.run(
        f'"{sys.executable}" -m mlxlm.cli.main models presets | true',
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_names_from_a_file_can_not_control_the_terminal(tmp_path):
    session = {"mlxlm_chat": 1, "model": f"/\x1b]52;c;aGFjaw==\x07{'x' * 9000}", "messages": []}
    (tmp_path / "session.json").write_text(json.dumps(session))
    line = error_line("chat", "--session", tmp_path / "session.json")
    assert line.isprintable() and "]52" in line and len(line) < 5000


def test_no_message_has_control_characters(capsys):
    render.say("a\x1b]52;c;\x07")
    render.result("b\x9d\n2")
    _show_warning(UserWarning("c\x1b[2J\nd"))
    out, err = capsys.readouterr()
    assert (out, err) == ("b\ufffd\n2\n", "a\ufffd]52;c;\ufffd\nwarning: c\\x1b[2J d\n")
