"""The tokenizer commands: bytes in, bytes out."""

import json

import pytest

from mlxlm.tokenizer import load
from tests.run_command import run_command

TEXT = (
    "It cost $1,234.56 in 2024.\n\n\tdef f(n):\r\n Ça coûte cher. 東京都 👩\u200d👧 \u2581 \0\x07 "
    "<s> <|user|> <0x0A>   \n \n"
)


@pytest.fixture
def run():
    """`run(*arguments, stdin=b"")`: the exit code, standard output and standard error of `mlxlm tokenizer`."""

    def run(*arguments, stdin=b""):
        done = run_command("tokenizer", *arguments, stdin=stdin)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tokenizer"
    tiny_tokenizer.save(folder)
    return folder


def test_bytes_survive_the_pipe(run, folder):
    data = TEXT.encode("utf-8") + b"\r\n\r\n\n no newline at the end"
    code, ids, stderr = run("encode", folder, stdin=data)
    assert (code, stderr) == (0, b"")
    assert run("decode", folder, stdin=ids) == (0, data, b"")


def test_encode_options(run, folder, tiny_tokenizer):
    ids = tiny_tokenizer.encode("one <|user|>")
    output = run("encode", folder, "--text", "one <|user|>", "--json")[1]
    assert json.loads(output) == {"ids": ids, "count": len(ids)}
    output = run("encode", folder, "--text", "one <|user|>", "--no-add-special-tokens")[1]
    assert [int(id) for id in output.split()] == ids[1:]


def test_train_and_info(run, tmp_path, make_text):
    source = tmp_path / "text.txt"
    source.write_text(make_text(2000), encoding="utf-8")
    arguments = ("train", source, "--vocab-size", "300", "--out", tmp_path / "new")
    code, stdout, stderr = run(*arguments)
    assert (code, stdout.decode().strip()) == (0, str(tmp_path / "new"))
    assert b"300 tokens" in stderr
    fingerprint = load(tmp_path / "new").fingerprint
    code, _, stderr = run(*arguments)
    assert code == 1
    assert stderr.startswith(b"error: ") and b"already exists" in stderr
    info = json.loads(run("info", tmp_path / "new", "--json", "--eval-text", source)[1])
    assert (info["tokenizer_type"], info["vocab_size"], info["fingerprint"]) == ("byte-level", 300, fingerprint)
    assert info["text"]["bytes"] == source.stat().st_size
    assert info["text"]["bytes_per_token"] == pytest.approx(info["text"]["bytes"] / info["text"]["tokens"])
    assert 0 < info["text"]["vocabulary_used"] <= 1
    table = run("info", tmp_path / "new")[1].decode()
    assert "byte-level" in table and fingerprint in table


def test_train_fails_before_reading_if_nothing_can_be_written(run, tmp_path):
    (tmp_path / "file").write_text("precious")
    code, _, stderr = run("train", "/dev/null", "--vocab-size", "300", "--out", tmp_path / "file" / "t")
    assert code == 1
    assert b"error: cannot write" in stderr and stderr.count(b"\n") == 1
    assert (tmp_path / "file").read_text() == "precious"


def test_train_from_stdin(run, tmp_path):
    options = ("--vocab-size", "900", "--tokenizer-type", "sentencepiece", "--out", tmp_path / "t")
    code, _, stderr = run("train", "-", *options, stdin=b"water wine water wine waters\n" * 50)
    assert code == 1 and stderr.count(b"\n") == 1
    assert b"larger than this text supports" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("encode",), b"ab\xff", b"stdin is not UTF-8: invalid start byte at byte 2"),
        (("decode",), b"1 two 3", b"'two' is not a token id"),
        (("decode",), b"99999999999999", b"is not a token id"),
        (("decode",), b"1 2 99999 3", b"99999 is not one of the tokenizer's "),
        (("info", "--eval-text", "/dev/null"), b"", b"/dev/null is empty"),
    ],
)
def test_invalid_input_is_one_line(run, folder, arguments, stdin, message):
    code, stdout, stderr = run(arguments[0], folder, *arguments[1:], stdin=stdin)
    assert (code, stdout) == (1, b"")
    assert message in stderr and stderr.count(b"\n") == 1
