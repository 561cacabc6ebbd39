"""Models in several files."""

import json
import shutil

import pytest

from mlxlm.checkpoint import open_checkpoint
from mlxlm.utils.errors import CheckpointError


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
