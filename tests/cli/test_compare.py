"""`mlxlm compare`."""

import json

import pytest

from tests.run_command import run


def test_compare(model, tmp_path):
    assert run("convert", model, "--out", tmp_path / "q4.gguf", "--dtype", "q4_0")[0] == 0
    code, out, _ = run("compare", model, tmp_path / "q4.gguf", "--tokens", "200")
    assert code == 0
    assert out.startswith("KL ") and "top-1 agreement" in out and "worst layers model." in out
    assert "bits per weight" in out and "largest errors, weights" in out
    (tmp_path / "text.txt").write_text("the cat sat on a mat " * 20)
    code, out, _ = run("compare", model, model, "--json", "--eval-text", tmp_path / "text.txt")
    found = json.loads(out)
    assert code == 0 and found["identical"] and found["kl"] == 0 and found["weights"]["only_a"] == []
    code, out, _ = run("compare", model, model, "--eval-text", tmp_path / "text.txt")
    assert out.startswith("identical: ")
    messages = [{"role": "user", "content": "the cat sat on"}, {"role": "assistant", "content": "a mat " * 20}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    code, out, _ = run("compare", model, model, "--eval-text", tmp_path / "chat.jsonl")
    assert code == 0 and out.startswith("identical: ")


@pytest.mark.parametrize("rows", [False, True])
def test_evaluate_compare_and_quantize_agree(model, tmp_path, make_text, rows):
    text = tmp_path / ("text.jsonl" if rows else "text.txt")
    content = make_text(700)
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in (content, "the cat")) if rows else content)
    _, out, _ = run("evaluate", model, text, "--json")
    evaluated = json.loads(out)
    _, out, _ = run("compare", model, model, "--eval-text", text, "--json")
    compared = json.loads(out)
    settings = ("--method", "rtn", "--group-size", "32", "--eval-text", text, "--no-verify", "--json")
    _, out, _ = run("quantize", model, "--out", tmp_path / "out", *settings)
    measured = json.loads(out)["metrics"]
    assert evaluated["tokens"] > 2 * evaluated["context_length"]
    for found in (compared, measured):
        assert [found[name] for name in ("tokens", "context_length", "stride")] == [
            evaluated[name] for name in ("tokens", "context_length", "stride")
        ]
    figures = [compared["bits_per_byte_a"], measured["bits_per_byte_before"]]
    assert figures == pytest.approx([evaluated["bits_per_byte"]] * 2, rel=1e-6)


def test_different_tokenizers_are_refused(model, tmp_path, make_text):
    from mlxlm.tokenizer import train

    assert run("convert", model, "--out", tmp_path / "other", "--no-verify")[0] == 0
    train([make_text(3000).upper()], 300).save(tmp_path / "other")
    code, _, err = run("compare", model, tmp_path / "other")
    assert code == 1 and "tokenize the text differently" in err
