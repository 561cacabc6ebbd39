import json
import subprocess
import sys

from mlxlm.data import TokenDataset


def mlxlm(*arguments, stdin=b""):
    command = [sys.executable, "-c", "from mlxlm.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60)


def test_prepare_from_stdin(byte_level, text, tmp_path):
    byte_level.save(tmp_path / "tokenizer")
    arguments = ("prepare", "-", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out")
    data = text(3000).encode("utf-8")
    done = mlxlm(*arguments, "--json", stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    manifest = json.loads(done.stdout)
    assert manifest["train"]["bytes"] + manifest["validation"]["bytes"] == len(data)
    assert len(TokenDataset.open(tmp_path / "out", "train")) == manifest["train"]["tokens"]
    again = mlxlm(*arguments, stdin=data)
    assert again.returncode == 1
    assert again.stderr.startswith(b"error: ") and again.stderr.count(b"\n") == 1


def test_prepare_files(byte_level, text, tmp_path):
    byte_level.save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(text(3000), encoding="utf-8")
    (tmp_path / "b.txt").write_text(text(300), encoding="utf-8")
    done = mlxlm(
        "prepare", tmp_path / "a.txt", "--validation", tmp_path / "b.txt",
        "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0
    assert b"validation" in done.stdout and b"wrote" in done.stderr
    assert TokenDataset.open(tmp_path / "out", "train").manifest.split == "given"


def test_wrong_usage(tmp_path):
    assert mlxlm("prepare", tmp_path).returncode == 2
    assert mlxlm("prepare", tmp_path, "--tokenizer", "t", "--out", "o", "--validation-fraction", "1").returncode == 2
