import json

import numpy as np
import pytest

from mlxlm.data import TokenDataset
from mlxlm.utils.errors import DataError

NO_TOKENS = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}


def test_slices_are_the_tokens(prepared, byte_level):
    data = TokenDataset.open(prepared, "train")
    assert len(data.manifest.train.shards) > 3
    joined = np.concatenate([np.fromfile(prepared / s.file, "<u2") for s in data.manifest.train.shards])
    assert len(data) == len(joined) == data.manifest.train.tokens
    n = len(data)
    for start, stop in [(0, 0), (0, 10), (4990, 5010), (5000, 10_000), (4999, 15_001), (0, n), (n, n)]:
        assert np.array_equal(data.slice(start, stop), joined[start:stop])
    assert data.vocab_size == byte_level.vocab_size
    assert data.documents == 2 and data.bytes == data.manifest.train.bytes


def test_a_slice_of_one_shard_is_a_view(prepared):
    data = TokenDataset.open(prepared, "train")
    assert isinstance(data.slice(10, 20).base, np.memmap)
    assert not data.slice(10, 20).flags.writeable


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 10**9)])
def test_slices_out_of_range(prepared, start, stop):
    with pytest.raises(IndexError):
        TokenDataset.open(prepared, "train").slice(start, stop)


def test_folders_that_are_not_datasets(tmp_path, prepared):
    with pytest.raises(DataError, match="has no manifest.json .*mlxlm prepare"):
        TokenDataset.open(tmp_path, "train")
    with pytest.raises(DataError, match="no split 'test'"):
        TokenDataset.open(prepared, "test")


def test_shards_that_were_cut_or_lost(prepared):
    path = prepared / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="train-00001.bin has 9999 bytes"):
        TokenDataset.open(prepared, "train")
    assert len(TokenDataset.open(prepared, "validation"))
    path.unlink()
    with pytest.raises(DataError, match="cannot read .*train-00001.bin"):
        TokenDataset.open(prepared, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "field 'version' is 1, not 3"),
        ({"version": None}, "field 'version'"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"vocab_size": -1}, "field 'vocab_size' is negative"),
        ({"vocab_size": True}, "field 'vocab_size'"),
        ({"fingerprint": 3}, "field 'fingerprint'"),
        ({"validation": []}, "field 'validation' is missing or not dict"),
        ({"parts": []}, "field 'parts' is empty"),
        ({"parts": [{"name": "a", "weight": 0, "train": NO_TOKENS}]}, "a weight is 0, it must be a positive number"),
        ({"parts": [{"name": "a", "weight": "1"}]}, r"field 'parts\[0\].weight' is missing or not a"),
        ({"validation": {"tokens": 1, "documents": 1, "bytes": 1, "shards": []}}, "'validation.tokens' is not the sum"),
        (
            {"validation": {"tokens": 1, "documents": 1, "bytes": 1, "shards": [{"file": "x", "tokens": 1}]}},
            r"field 'validation.shards\[0\].sha256' is missing",
        ),
        ({"dedup": {"documents": -1, "threshold": 0.8}}, "field 'dedup.documents' is negative"),
    ],
)
def test_malformed_manifests_name_the_field(prepared, change, message):
    path = prepared / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=f"manifest.json: .*{message}"):
        TokenDataset.open(prepared, "train")


def test_shards_stay_in_their_folder(prepared):
    path = prepared / "manifest.json"
    content = json.loads(path.read_text())
    for name in ("../train-00000.bin", "/etc/hostname", "a/b.bin", ""):
        content["parts"][0]["train"]["shards"][0]["file"] = name
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"field 'parts\[0\].train.shards\[0\].file' is not a plain file name"):
            TokenDataset.open(prepared, "train")
    path.write_text("[]")
    with pytest.raises(DataError, match="manifest.json"):
        TokenDataset.open(prepared, "train")
