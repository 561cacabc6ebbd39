"""What `open_checkpoint` and `open_tokenizer` accept: folders, runs, single files and names."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import open_checkpoint, open_tokenizer, save_weights
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.checkpoint.safetensors import file_tensors
from mlxlm.families import config_to_hf
from mlxlm.generation.loaded_model import load
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.train import open_base_model
from mlxlm.train.settings import TokenizerOptions
from mlxlm.train.start import existing_tokenizer
from mlxlm.utils.errors import CheckpointError, MlxlmError, TokenizerError
from tests.checkpoint.raw_files import entry, header_file


def test_folder_is_described_but_not_read(model_dir, tiny_config):
    checkpoint = open_checkpoint(model_dir)
    assert (checkpoint.format, checkpoint.config) == ("safetensors", tiny_config)
    tensor = checkpoint.tensors["model.embed_tokens.weight"]
    assert (tensor.shape, tensor.dtype, tensor.stored_dtype, tensor.nbytes) == (
        (300, 32),
        mx.float32,
        "F32",
        300 * 32 * 4,
    )
    assert checkpoint.load_tokenizer().vocab_size == 300


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"base_model_name_or_path": "org/base"}, "adapter_model.safetensors"),
        ({"model": "org/base"}, "adapters.safetensors"),
    ],
)
def test_a_lora_adapter_is_no_model(tmp_path, config, file):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match="is a LoRA adapter, without the weights of org/base .*org/base with --adapter"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "x.gguf", "x.bin",
     "pytorch_model.bin", "pytorch_model.bin.index.json", "tokenizer.json"],
)  # fmt: skip
def test_only_regular_files_are_read(model_dir, kind, name):
    """A pipe would be waited for, and a device never ends."""
    path = model_dir / name
    path.unlink(missing_ok=True)
    if name.startswith("pytorch"):
        (model_dir / "model.safetensors").unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    source = path if name.startswith("x.") else model_dir
    with pytest.raises(MlxlmError, match=f"{name} is not a regular file|no tokenizer in"):
        open_checkpoint(source).load_tokenizer()
    if name == "tokenizer.json":
        with pytest.raises(MlxlmError, match="tokenizer.json is not a regular file"):
            load_tokenizer(path)


def test_gguf_files_in_a_folder(model_dir):
    """As the hub has them: config.json is that of their source."""
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\*.safetensors, pytorch_model\*.bin or .gguf file"):
        open_checkpoint(model_dir)
    (model_dir / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="a.gguf"):
        open_checkpoint(model_dir)
    (model_dir / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="several GGUF files .try: one of them: a.gguf, b.gguf"):
        open_checkpoint(model_dir)


def test_missing_files_are_not_hub_ids(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("models/typo.gguf", "a/b.safetensors", "a/model.bin"):
        with pytest.raises(CheckpointError, match=f"there is no file {name}"):
            open_checkpoint(name)
    with pytest.raises(CheckpointError, match="the model name is empty"):
        open_checkpoint("")


def test_tensor_with_and_without_prefix_is_an_error(model_dir):
    weights = mx.load(str(model_dir / "model.safetensors"))
    save_weights(model_dir, {**weights, "norm.weight": weights["model.norm.weight"]})
    with pytest.raises(CheckpointError, match="model.norm.weight occurs twice, with and without a prefix"):
        open_checkpoint(model_dir)


@pytest.mark.parametrize(
    ("own", "more", "ends"),
    [
        (2, [2, 5, 7], [2, 5, 7]),
        (None, 5, 5),
        ([2, 3], 3, [2, 3]),
        (2, None, 2),
        (2, 2, 2),
        (2, [2, 32_000], 2),
        ([2, 32_000], 2, 2),
        (32_000, None, None),
    ],
)
def test_eos_ids_of_generation_config(model_dir, tiny_config, own, more, ends):
    values = {**config_to_hf(tiny_config), "eos_token_id": own}
    (model_dir / "config.json").write_text(json.dumps(values))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert open_checkpoint(model_dir).config.eos_token_id == ends


def test_special_tokens_beyond_the_vocabulary(model_dir, tiny_config, tiny_tokenizer):
    content, size = json.loads(tiny_tokenizer.to_json()), tiny_config.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": size, "content": "<image_soft_token>", "special": True, **flags})
    (model_dir / "tokenizer.json").write_text(json.dumps(content))
    lm = load(model_dir)
    assert lm.tokenizer.vocab_size == size + 1 and lm.tokenizer.min_vocab_size <= size
    assert open_base_model(model_dir)[1].vocab_size == size + 1
    config = SimpleNamespace(eos_token_ids=frozenset({1, size}), vocab_size=size)
    assert size not in replace(lm, config=config).eos_token_ids
    lm.tokenizer.chat_template = "{{ messages }}<image_soft_token>"
    assert lm.tokenizer.min_vocab_size == size + 1
    marks = [{**content["added_tokens"][-1], "content": mark} for mark in ("<|im_start|>", "<|im_end|>")]
    marks = [{**mark, "id": size + 1 + n} for n, mark in enumerate(marks)]
    (model_dir / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": content["added_tokens"] + marks}))
    assert load(model_dir).tokenizer.min_vocab_size <= size
    with pytest.raises(CheckpointError, match=f"has {size + 3} tokens and the model {size}"):
        open_base_model(model_dir)  # would train on them
    content["added_tokens"][-1]["special"] = False
    (model_dir / "tokenizer.json").write_text(json.dumps(content))
    for opened in (load, open_base_model):
        with pytest.raises(CheckpointError, match=f"the tokenizer has {size + 1} tokens and the model {size}"):
            opened(model_dir)


def test_invalid_eos_ids_are_errors(model_dir):
    (model_dir / "generation_config.json").write_text(f'{{"eos_token_id": {2**40}}}')
    with pytest.raises(MlxlmError, match="eos_token_id is .*1099511627776"):
        open_checkpoint(model_dir)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(MlxlmError, match=r"generation_config.json: eos_token_id is \['x'\]"):
        open_checkpoint(model_dir)


def test_byte_order_mark_and_folder_as_config(model_dir):
    file = model_dir / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    open_checkpoint(model_dir)
    file.unlink()
    file.mkdir()
    with pytest.raises(MlxlmError, match="config.json is not a regular file"):
        open_checkpoint(model_dir)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.bin", b"PK\x03\x04....", "one file of a model.*its folder"),
        ("y.bin", b"\1\0\0\0", r"y\.bin is truncated"),
        ("x.safetensors", b"", "one file of a model.*its folder"),
        ("x.txt", b"hello", "not a model"),
        ("empty", b"", "not a model"),
    ],
)
def test_other_files_are_errors(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path / name)


def test_float8_is_for_mlx_lm_only(model_dir):
    """It has models that scale them; our decoder takes none."""
    path = model_dir / "model.safetensors"
    header = {"model.embed_tokens.weight": entry(0, 9600, [300, 32], "F8_E4M3")}
    assert file_tensors(header_file(path, header, bytes(9600)))["model.embed_tokens.weight"].dtype == mx.uint8
    values = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**values, "model_type": "deepseek_v32"}))
    assert "deepseek_v32" in open_checkpoint(model_dir).unsupported_reason
    layer = {f"model.layers.{i}.x": entry(9600, 9600, [0]) for i in range(2)}
    header_file(path, header | layer, bytes(9600))
    (model_dir / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="embed_tokens.weight is of type F8_E4M3, not floating-point"):
        open_checkpoint(model_dir)


def test_a_name_is_a_model_unless_a_path_has_it(tiny_tokenizer, tmp_path, monkeypatch):
    bundled = open_checkpoint("small-world").load_tokenizer().fingerprint
    assert open_tokenizer("small-world").fingerprint == bundled
    assert existing_tokenizer(TokenizerOptions("small-world"), None).fingerprint == bundled
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer.save(tmp_path / "small-world")
    assert open_tokenizer("small-world").fingerprint == tiny_tokenizer.fingerprint != bundled
    with pytest.raises(TokenizerError, match="other"):
        open_tokenizer("other")


def test_pipe_as_state_is_ignored(tmp_path):
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    os.mkfifo(tmp_path / "checkpoints" / "step-2" / "state.json")
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text('{"validation_loss": 1.5}')
    assert best_checkpoint(tmp_path).name == "step-1"
    (tmp_path / "checkpoints" / "step-10").mkdir()
    (tmp_path / "checkpoints" / "step-10" / "state.json").write_text('{"validation_loss": 1.5}')
    assert best_checkpoint(tmp_path).name == "step-10"  # the latest of equal ones
