"""Models in several files."""

import json
import shutil

import pytest

from mlxlm.checkpoint import open_checkpoint, sharded
from mlxlm.checkpoint.safetensors import folder_tensors
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.raw_safetensors import entry, header_file


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"w": "/etc/passwd"}}, "points outside its folder"),
        ({"weight_map": {"w": "../model.safetensors"}}, "points outside its folder"),
        ({"weight_map": {"w": ".."}}, "points outside its folder"),
        ({"weight_map": {"w": "gone.safetensors"}}, "gone.safetensors is missing"),
        ({"weight_map": {"gone": "model.safetensors"}}, "tensor gone is not in model.safetensors"),
        ({"weight_map": {"w": 3}}, "weight_map is not an object of file names"),
        ({"weight_map": []}, "weight_map is not an object of file names"),
        ([], "not a JSON object"),
    ],
)
def test_invalid_indexes_are_errors(model_dir, index, expected):
    path = model_dir / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_checkpoint(model_dir)
    assert str(path) in str(caught.value)


def test_several_files_without_an_index(model_dir):
    shutil.copy(model_dir / "model.safetensors", model_dir / "model.fp16.safetensors")
    assert open_checkpoint(model_dir).format == "safetensors"  # the other is a variant
    (model_dir / "model.safetensors").rename(model_dir / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is also in another file of"):
        open_checkpoint(model_dir)


def test_limits_hold_for_all_files_together(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "_MAX_TENSORS", 50)
    monkeypatch.setattr(sharded, "_MAX_FILES", 10)
    for shard in range(3):
        empty = {f"{shard}.{i}": entry(0, 0, [0]) for i in range(20)}
        header_file(tmp_path / f"model-0000{shard}-of-00003.safetensors", empty)
    with pytest.raises(CheckpointError, match="00002-of-00003.safetensors: the files up to this one have more tensors"):
        folder_tensors(tmp_path)
    (tmp_path / "other").mkdir()
    index = {"weight_map": {f"w{i}": f"{i}.safetensors" for i in range(11)}}
    (tmp_path / "other" / "model.safetensors.index.json").write_text(json.dumps(index))
    for i in range(11):
        (tmp_path / "other" / f"{i}.safetensors").touch()
    with pytest.raises(CheckpointError, match="other: 11 weight files"):
        folder_tensors(tmp_path / "other")
