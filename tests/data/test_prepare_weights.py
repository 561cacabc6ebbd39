"""Sources with weights, as parts of the prepared folder; masks of conversations."""

import json

import pytest

from mlxlm.data import DataOptions, TokenDataset, prepare
from mlxlm.data.manifest import Manifest
from mlxlm.utils.errors import DataError
from tests.data.helpers import jsonl


def test_parts_have_shards_of_their_own(byte_level, text, tmp_path):
    (tmp_path / "a.txt").write_text(text(3000), encoding="utf-8")
    jsonl(tmp_path / "b.jsonl", [{"text": f"{i} {text(30, i)}"} for i in range(60)])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text(text(900, 5), encoding="utf-8")
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "sub" / "a.txt"]
    manifest = prepare(DataOptions(paths, weights=[2, 1, 1]), byte_level, tmp_path / "out", shard_tokens=1000)
    assert [(p.name, p.weight) for p in manifest.parts] == [("a.txt", 0.5), ("b.jsonl", 0.25), ("a.txt (2)", 0.25)]
    assert manifest.validation_split == "mixed"  # two are few documents, one is many
    names = [shard.file for part in manifest.parts for shard in part.train.shards]
    assert names == [f"train-{i:05d}.bin" for i in range(len(names))] and len(names) > 6
    data = TokenDataset.open(tmp_path / "out", "train")
    assert Manifest.read(tmp_path / "out") == manifest == data.manifest
    first = 0
    for path, part in zip(paths, manifest.parts, strict=True):
        alone = prepare(DataOptions([path]), byte_level, tmp_path / f"alone{first}", shard_tokens=1000)
        assert part.train.shards[-1].tokens < 1000
        assert [s.sha256 for s in part.train.shards] == [s.sha256 for s in alone.train.shards]
        assert (part.train.tokens, part.train.documents) == (alone.train.tokens, alone.train.documents)
        first += part.train.tokens
    assert first == len(data) == manifest.train.tokens
    assert manifest.validation.documents == 1 + 3 + 1


def test_given_validation_and_weights(byte_level, tmp_path):
    for name in ("a", "b", "v"):
        (tmp_path / f"{name}.txt").write_text(f"river {name}")
    paths, held = [tmp_path / "a.txt", tmp_path / "b.txt"], [tmp_path / "v.txt"]
    manifest = prepare(DataOptions(paths, weights=[1, 3], validation=held), byte_level, tmp_path / "out")
    assert manifest.validation_split == "files" and manifest.validation.documents == 1
    assert [part.train.documents for part in manifest.parts] == [1, 1]
    with pytest.raises(DataError, match="2 sources have 1 weights"):
        prepare(DataOptions(paths, weights=[1]), byte_level, tmp_path / "other")
    with pytest.raises(DataError, match="a weight is 0"):
        prepare(DataOptions(paths, weights=[1, 0]), byte_level, tmp_path / "other")
    empty = jsonl(tmp_path / "c.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match="no text in the sources"):
        prepare(DataOptions([*paths, empty], weights=[1, 1, 1]), byte_level, tmp_path / "other")


def test_weights_can_be_changed_in_the_manifest(byte_level, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"river {name}")
    prepare(DataOptions([tmp_path / "a.txt", tmp_path / "b.txt"], weights=[1, 1]), byte_level, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    content["parts"][0]["weight"] = 1.5
    path.write_text(json.dumps(content))
    assert [part.weight for part in Manifest.read(tmp_path / "out").parts] == [0.75, 0.25]


def test_the_commands(byte_level, text, tmp_path):
    from click.testing import CliRunner

    from mlxlm.cli.prepare import prepare as command

    byte_level.save(tmp_path / "tokenizer")
    rows = [{"story": f"{i} {text(40, i)}"} for i in range(30)]
    jsonl(tmp_path / "a.jsonl", [*rows, *rows[:6]])
    jsonl(tmp_path / "b.jsonl", [{"story": text(60, 77)}])
    arguments = [f"{tmp_path}/a.jsonl=3", f"{tmp_path}/b.jsonl=1", "--text-column", "story", "--dedup", "0.9"]
    where = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, [*arguments, *where], catch_exceptions=False)
    assert done.exit_code == 0
    assert "train: a.jsonl, 75.0%" in done.stdout
    assert "dropped 6 exact and 0 near duplicates of 37 documents (16.2%" in done.stderr
    assert [part.name for part in Manifest.read(tmp_path / "out").parts] == ["a.jsonl", "b.jsonl"]
    assert CliRunner().invoke(command, [*arguments[:4], "--dedup", "0", *where]).exit_code == 2
