"""Tokens of prepared data and of texts."""

import gzip
import json
import os

import pytest

import mlxlm
from mlxlm.plan.corpus import count_corpus
from mlxlm.utils.errors import DataError


def test_tokens_and_epochs_of_a_text(text_file):
    from mlxlm.plan.corpus import bytes_per_token

    planned = mlxlm.plan("0.3m", machine="a100", data=[text_file], tokens=1e6)
    assert planned.corpus.tokens == pytest.approx(text_file.stat().st_size / bytes_per_token(512))
    assert planned.epochs == pytest.approx(1e6 / planned.corpus.tokens) and not planned.corpus.counted
    assert planned.disk.shards == 2 * round(planned.corpus.tokens)
    weighted = mlxlm.plan("0.3m", machine="a100", data=[f"{text_file}=3"])
    assert weighted.corpus == planned.corpus


def test_compressed_text(tmp_path, make_text, monkeypatch):
    from mlxlm.plan import corpus

    text = make_text(20_000)
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_bytes(gzip.compress(json.dumps({"story": text}).encode()))
    whole = corpus.count_corpus([rows], 512, "story")
    assert whole.bytes == len(text) > 3 * rows.stat().st_size
    monkeypatch.setattr(corpus, "_SAMPLE_BYTES", 1 << 18)
    (tmp_path / "text").write_text(10 * text)
    assert corpus.count_corpus([tmp_path / "text"], 512).bytes == pytest.approx(10 * len(text), rel=0.3)  # by a part
    with pytest.raises(DataError, match="`text_column=NAME`"):
        corpus.count_corpus([rows], 512)


def test_arrow_tables(tmp_path, make_text, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install 'mlxlm[data]')")
    from mlxlm.plan import corpus

    table = pa.table({"text": [make_text(20)] * 2000})
    monkeypatch.setattr(corpus, "_SAMPLE_BYTES", 1 << 14)
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
        assert corpus.count_corpus([path], 512).bytes == pytest.approx(2000 * len(make_text(20)), rel=0.1)


def test_prepared_data_without_tokens(tmp_path, text_file):
    from mlxlm.data import DataOptions, prepare
    from mlxlm.tokenizer import train

    prepare(DataOptions([text_file]), train([text_file.read_text()], 270), tmp_path / "data")
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    manifest["parts"][0]["train"] |= {"tokens": 0, "shards": []}
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has no tokens to train on"):
        count_corpus([tmp_path / "data"], 512)


def test_text_without_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "rows.jsonl").write_text('{"text": null}')
    for name, problem in (("pipe", "has no size"), ("-", "has no size"), ("rows.jsonl", "has no text")):
        with pytest.raises(DataError, match=problem):
            count_corpus([name if name == "-" else tmp_path / name], 512)
