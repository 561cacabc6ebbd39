"""`mlxlm draft`, and generation with its result."""

import json

import pytest

from tests.run_command import run

QUICK = ("--num-tokens", "4096", "--epochs", "1")


def test_a_head_is_trained_and_used(model, text_file, tmp_path):
    folder = tmp_path / "head"
    code, out, err = run("draft", model, "--text", text_file, "--out", folder, *QUICK)
    assert code == 0 and "Traceback" not in err
    assert f"{folder}: a draft head of " in out and "right 1 token ahead" in out and "right 2 tokens ahead" in out
    command = ("generate", model, "-p", "the cat", "-n", "40", "-t", "0", "--json")
    code, with_head, err = run(*command, "--draft-model", folder)
    assert code == 0, err
    _, plain, _ = run(*command)
    assert json.loads(with_head)["text"] == json.loads(plain)["text"]


def test_json(model, text_file, tmp_path):
    code, out, _ = run("draft", model, "--text", text_file, "--out", tmp_path / "head", *QUICK, "--json")
    report = json.loads(out)
    assert code == 0 and report["tokens"] == 4096 and len(report["losses"]) == 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--num-tokens", "10"], 2, "--num-tokens is 10, it must be a whole number from 4096 up"),
        (["--vocab-size", "0"], 2, "--vocab-size is 0"),
        (["--learning-rate", "nan"], 2, "--learning-rate is nan"),
        (["--text", "nowhere.txt"], 2, "'nowhere.txt' does not exist"),
    ],
)
def test_wrong_options(model, text_file, tmp_path, options, code, message):
    status, out, err = run("draft", model, "--text", text_file, "--out", tmp_path / "head", *options)
    assert (status, out) == (code, "") and message in err.splitlines()[-1]


def test_nothing_is_overwritten(model, text_file, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "notes.txt").touch()
    code, _, err = run("draft", model, "--text", text_file, "--out", tmp_path / "head")
    assert code == 1 and "head already exists" in err


def test_a_folder_that_is_no_head_of_the_model(model, text_file, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"model_type": "mlxlm_draft_head"}', encoding="utf-8")
    code, _, err = run("generate", model, "-p", "x", "--draft-model", tmp_path / "head")
    assert code == 1 and "is not that of a draft head" in err
