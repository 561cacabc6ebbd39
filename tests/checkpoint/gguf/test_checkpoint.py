"""Whole, split and truncated files."""

from __future__ import annotations

import gguf as gguf_package
import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of


def test_every_truncation_is_an_error(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200, 7), *range(200, len(content) - 32, 4001), len(content) - 32]:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="past the end|not a whole|more than the file"):
            open_checkpoint(cut)


def split(model, tokenizer, folder, parts=3):
    """A model in parts, by the gguf package."""
    gguf.write(folder / "whole.gguf", model.config, tensors_of(model), tokenizer, "F32")
    whole = gguf_package.GGUFReader(folder / "whole.gguf")
    paths = []
    for i in range(parts):
        paths.append(folder / f"m-{i + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf_package.GGUFWriter(paths[-1], "llama")
        if i == 0:
            for name, field in whole.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    kinds = field.types
                    writer.add_key_value(name, field.contents(), kinds[0], *([] if len(kinds) == 1 else [kinds[-1]]))
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[i::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_model_opens_by_any_part(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    paths = split(model, tiny_tokenizer, tmp_path)
    whole = open_checkpoint(tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    for path in [*paths, tmp_path / "mmproj-m-f16.gguf"]:  # an image encoder
        (tmp_path / "parts" / path.name).symlink_to(path)
    (tmp_path / "mmproj-m-f16.gguf").write_bytes(b"GGUF")
    with pytest.warns(match="mmproj-m-f16.gguf is ignored"):
        assert open_checkpoint(tmp_path / "parts").path.name == "m-00001-of-00003.gguf"
    for path in paths:
        parts = open_checkpoint(path)
        assert parts.config == whole.config and set(parts.tensors) == set(whole.tensors)
        assert parts.load_tokenizer().fingerprint == tiny_tokenizer.fingerprint
        for name, tensor in parts.tensors.items():
            assert (tensor.read() == whole.tensors[name].read()).all().item()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf: split.no"):
        open_checkpoint(paths[0])


def test_file_truncated_after_opening(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    path = tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F32")
    opened = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.tensors["lm_head.weight"].read()
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.load_tokenizer()
