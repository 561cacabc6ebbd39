import json

from mlxlm.data import TokenDataset
from tests.run_command import run_command


def test_prepare_from_stdin(byte_level, text, tmp_path):
    byte_level.save(tmp_path / "tokenizer")
    arguments = ("prepare", "-", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out")
    data = text(3000).encode("utf-8")
    done = run_command(*arguments, "--json", stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    manifest = json.loads(done.stdout)
    assert manifest["train"]["bytes"] + manifest["validation"]["bytes"] == len(data)
    assert len(TokenDataset.open(tmp_path / "out", "train")) == manifest["train"]["tokens"]
    again = run_command(*arguments, stdin=data)
    assert again.returncode == 1
    assert again.stderr.startswith(b"error: ") and again.stderr.count(b"\n") == 1


def test_prepare_files(byte_level, text, tmp_path):
    byte_level.save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(text(3000), encoding="utf-8")
    (tmp_path / "b.txt").write_text(text(300), encoding="utf-8")
    done = run_command(
        "prepare", tmp_path / "a.txt", "--validation", tmp_path / "b.txt",
        "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0
    assert b"validation" in done.stdout and b"wrote" in done.stderr
    assert TokenDataset.open(tmp_path / "out", "train").manifest.validation_split == "files"


def test_bad_input_stops_or_is_skipped(byte_level, text, tmp_path):
    """In all commands that read text into a file; the count is on stderr."""
    byte_level.save(tmp_path / "tokenizer")
    lines = text(3000).encode().splitlines(keepends=True)
    (tmp_path / "a.txt").write_bytes(b"".join([*lines[:4], b"bad \xff line\n", *lines[4:]]))
    commands = (
        ("prepare", tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer"),
        ("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", "270"),
    )
    for number, command in enumerate(commands):
        done = run_command(*command, "--out", tmp_path / f"out {number}")
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1
        assert b"a.txt is not UTF-8 text: 0xFF at byte" in done.stderr and b", in line 5 (try: " in done.stderr
        assert b"--on-bad-input skip" in done.stderr
        done = run_command(*command, "--out", tmp_path / f"out {number}", "--on-bad-input", "skip")
        assert done.returncode == 0 and b"skipped 1 bad line or row of the input\n" in done.stderr
    assert TokenDataset.open(tmp_path / "out 0", "train").manifest.skipped == 1


def test_wrong_usage(tmp_path):
    assert run_command("prepare", tmp_path).returncode == 2
    assert (
        run_command("prepare", tmp_path, "--tokenizer", "t", "--out", "o", "--validation-fraction", "1").returncode == 2
    )
