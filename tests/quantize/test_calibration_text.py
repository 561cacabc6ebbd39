"""Texts for calibration and evaluation."""

from __future__ import annotations

import shutil

import pytest

from mlxlm.quantize import calibration_text as text
from mlxlm.quantize import quantize
from mlxlm.utils.errors import MlxlmError


def test_calibration_and_evaluation_never_share_text(model, tmp_path, tiny_tokenizer, texts):
    for given in (None, texts[0]):
        first = text.calibration_text(None, tiny_tokenizer, given, whole=False)
        second = text.eval_text(None, tiny_tokenizer, None, given)
        assert first.name != second.name
        [ids] = second.documents
        tail = ids[:40]
        there = first.tokens.tolist()
        assert not any(there[i : i + 40] == tail for i in range(len(there)))
        predicted = ids if ids[0] == tiny_tokenizer.bos_token_id else ids[1:]
        assert second.bytes == len(tiny_tokenizer.decode(predicted).encode())
    whole = text.calibration_text(None, tiny_tokenizer, texts[0], whole=True)
    assert len(whole.tokens) > len(first.tokens)


def test_documents_are_separate(tiny_tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"text": "one"}\n{"messages": [{"role": "user", "content": "a"}, {"role": "b", "content": "c"}]}\n'
    )
    assert tiny_tokenizer.decode(text.text_of_file(file, tiny_tokenizer, 100).tokens.tolist()) == "one\n\na\n\nc"
    found = text.eval_text(None, tiny_tokenizer, file, None)
    assert [tiny_tokenizer.decode(ids) for ids in found.documents] == ["one", "a\n\nc"]


def test_text_files_replace_the_data_of_a_run(model, tmp_path, texts):
    shutil.copytree(model, tmp_path / "run")
    (tmp_path / "run" / "train.json").write_text("{}")
    step = tmp_path / "run" / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (tmp_path / "run" / "model.safetensors").rename(step / "model.safetensors")
    report = quantize(tmp_path / "run", tmp_path / "out", method="rtn", eval_text=texts[1])
    assert report.metrics.text.endswith("evaluation.txt")
    with pytest.raises(MlxlmError, match="--calibration-text FILE"):
        quantize(tmp_path / "run", tmp_path / "gptq", eval_text=texts[1])
    with pytest.raises(MlxlmError, match="--eval-text FILE"):
        quantize(tmp_path / "run", tmp_path / "measured", method="rtn")
