"""The commands through real pipes: bytes in, bytes out."""

import json
import subprocess
import sys

import pytest

from mlxlm.tokenizer import load


def mlxlm(*arguments, stdin=b""):
    command = [sys.executable, "-c", "from mlxlm.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tokenizer"
    trained.save(folder)
    return folder


def test_bytes_survive_the_pipe(folder, sample):
    data = sample.encode("utf-8") + b"\r\n\r\n\n no newline at the end"
    encoded = mlxlm("tokenizer", "encode", folder, stdin=data)
    decoded = mlxlm("tokenizer", "decode", folder, stdin=encoded.stdout)
    assert decoded.stdout == data
    assert (encoded.stderr, decoded.stderr) == (b"", b"")


def test_encode_options(folder, trained):
    ids = trained.encode("one <|user|>")
    shown = mlxlm("tokenizer", "encode", folder, "--text", "one <|user|>", "--json")
    assert json.loads(shown.stdout) == {"ids": ids, "count": len(ids)}
    shown = mlxlm("tokenizer", "encode", folder, "--text", "one <|user|>", "--no-add-special-tokens")
    assert [int(word) for word in shown.stdout.split()] == ids[1:]


def test_train_and_info(tmp_path, corpus):
    source = tmp_path / "text.txt"
    source.write_text("\n".join(corpus).replace("\0", ""), encoding="utf-8", newline="")
    arguments = ("tokenizer", "train", source, "--vocab-size", "400", "--out", tmp_path / "new")
    done = mlxlm(*arguments)
    assert (done.returncode, done.stdout.decode().strip()) == (0, str(tmp_path / "new"))
    assert b"400 tokens" in done.stderr
    before = load(tmp_path / "new").fingerprint
    again = mlxlm(*arguments)
    assert again.returncode == 1
    assert again.stderr.startswith(b"error: ") and b"already exists" in again.stderr
    shown = json.loads(mlxlm("tokenizer", "info", tmp_path / "new", "--json", "--text", source).stdout)
    assert (shown["tokenizer_type"], shown["vocab_size"], shown["fingerprint"]) == ("byte-level", 400, before)
    assert shown["text"]["bytes"] == source.stat().st_size
    assert shown["text"]["bytes_per_token"] == pytest.approx(shown["text"]["bytes"] / shown["text"]["tokens"])
    assert 0 < shown["text"]["vocabulary_used"] <= 1
    table = mlxlm("tokenizer", "info", tmp_path / "new").stdout.decode()
    assert "byte-level" in table and before in table


def test_train_where_nothing_can_be_written_fails_before_reading(tmp_path):
    (tmp_path / "file").write_text("precious")
    done = mlxlm("tokenizer", "train", "/dev/null", "--vocab-size", "300", "--out", tmp_path / "file" / "t")
    assert done.returncode == 1
    assert b"error: cannot write" in done.stderr and done.stderr.count(b"\n") == 1
    assert (tmp_path / "file").read_text() == "precious"


def test_train_from_stdin(tmp_path):
    arguments = (
        "tokenizer",
        "train",
        "-",
        "--vocab-size",
        "900",
        "--tokenizer-type",
        "sentencepiece",
        "--out",
        tmp_path / "t",
    )
    done = mlxlm(*arguments, stdin=b"water wine water wine waters\n" * 50)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1
    assert b"larger than this text supports" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("encode",), b"ab\xff", b"stdin is not UTF-8: invalid start byte at byte 2"),
        (("decode",), b"1 two 3", b"'two' is not a token id"),
        (("decode",), b"99999999999999", b"is not a token id"),
        (("decode",), b"1 2 99999 3", b"99999 is not one of the tokenizer's "),
        (("info", "--text", "/dev/null"), b"", b"/dev/null is empty"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, stdin, message):
    done = mlxlm("tokenizer", arguments[0], folder, *arguments[1:], stdin=stdin)
    assert done.returncode == 1
    assert done.stdout == b""
    assert message in done.stderr and done.stderr.count(b"\n") == 1
