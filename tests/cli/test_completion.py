"""Shell completion, in the shells themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pexpect
import pytest

from mlxlm.cli import completion
from tests.cli.helpers import MLXLM, run_process
from tests.paths import ROOT


@pytest.fixture
def user(home, tmp_path):
    """The environment of a user with `mlxlm` on the path, and the folder that is their home."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mlxlm"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(MLXLM)} "$@"\n')
    program.chmod(0o755)
    unset = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "BASH_COMPLETION_USER_DIR", "ZDOTDIR")
    home = {name: value for name, value in home.items() if name not in unset}
    return {**home, "PATH": f"{program.parent}:{home['PATH']}", "TERM": "dumb"}, tmp_path / "home"


def install(environment, shell):
    result = run_process("--install-completion", env={**environment, "SHELL": f"/bin/{shell}"})
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_bash(user):
    environment, home = user
    (home / ".bashrc").write_text("PS1='ready> '")  # without a line end
    said = install(environment, "bash")
    assert "added a line to" in said or any(map(os.path.exists, completion._BASH_COMPLETION))
    assert "installed already" in install(environment, "bash")
    script = home / ".local/share/bash-completion/completions/mlxlm"
    with (home / ".bashrc").open("a") as file:
        file.write(f"source {script}\n")  # as the package bash-completion does
    bash = pexpect.spawn("bash", ["--noprofile", "-i"], env=environment, encoding="utf-8", timeout=30, cwd=home)
    try:
        bash.expect("ready> ")
        bash.send("mlxlm inspect smollm3\t")
        bash.expect("smollm3-3b")
        bash.sendcontrol("u")
        (home / "notes.gguf").touch()
        bash.send("mlxlm chat not\t")
        bash.expect("notes.gguf")
    finally:
        bash.close(force=True)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(user):
    environment, home = user
    assert "added a line to" in install(environment, "zsh")
    assert "installed already" in install(environment, "zsh")
    command = ["zsh", "-i", "-c", "print $_comps[mlxlm]"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "_mlxlm_completion"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(user):
    environment, _ = user
    install(environment, "fish")
    command = [
        "fish",
        "-c",
        "complete -C 'mlxlm chat smollm2-1'; complete -C 'mlxlm plan --k'; complete -C 'mlxlm mod'",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    words = [line.split("\t")[0] for line in result.stdout.splitlines()]
    assert words == ["smollm2-1.7b", "smollm2-135m", "--kv-bits", "models"]


def test_files_of_others_stay(user):
    environment, home = user
    path = home / ".config/fish/completions/mlxlm.fish"
    path.parent.mkdir(parents=True)
    path.write_text("complete -c mlxlm -a mine\n")
    result = run_process("--install-completion", "fish", env=environment)
    assert result.returncode == 1 and "mlxlm.fish was not written by mlxlm" in result.stderr
    assert path.read_text() == "complete -c mlxlm -a mine\n"


def test_an_older_script_is_replaced(user):
    environment, home = user
    install(environment, "fish")
    path = home / ".config/fish/completions/mlxlm.fish"
    script = path.read_text()
    path.write_text(script + "# older\n")
    assert "wrote" in install(environment, "fish") and path.read_text() == script


def test_another_shell(user):
    environment, _ = user
    result = run_process("--install-completion", env={**environment, "SHELL": "/bin/tcsh"})
    assert (
        result.returncode == 1 and "no completion for the shell 'tcsh' (try: one of bash, zsh, fish)" in result.stderr
    )


@pytest.mark.parametrize(
    "words", ["mlxlm ", "mlxlm chat s", "mlxlm serve s", "mlxlm models pull s", "mlxlm evaluate s"]
)
def test_answers_do_not_import_mlx(words, home):
    code = "import sys; from mlxlm.cli.main import app; from mlxlm.cli import completion; completion.answer(app)"
    code += "; sys.exit('mlx.core' in sys.modules)"
    words = {"_MLXLM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**home, **words}, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "smollm2-135m" in result.stdout or "chat" in result.stdout
