"""What a user may name: folders, runs, single files, ids of the hub."""

import json
import os
import shutil
import struct
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import hub, load_model, load_submodule, open_checkpoint, save_weights
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.checkpoint.safetensors import file_tensors, folder_tensors
from mlxlm.families import config_to_hf
from mlxlm.generation.loaded_model import load
from mlxlm.model import Decoder
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.train.finetune import open_base_model
from mlxlm.utils.errors import CheckpointError, MlxlmError

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model_dir(tmp_path, tiny_config, tiny_tokenizer):
    model = Decoder(tiny_config)
    model.init_weights(0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    save_weights(folder, dict(tree_flatten(model.parameters())))
    tiny_tokenizer.save(folder)
    return folder


def header_file(path, header: dict | bytes, data: bytes = b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(first, last, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_folder_is_described_and_not_read(model_dir, tiny_config):
    checkpoint = open_checkpoint(model_dir)
    assert (checkpoint.format, checkpoint.unsupported_reason, checkpoint.config) == ("safetensors", None, tiny_config)
    tensor = checkpoint.tensors["model.embed_tokens.weight"]
    assert (tensor.shape, tensor.dtype, tensor.stored_dtype, tensor.nbytes) == (
        (300, 32),
        mx.float32,
        "F32",
        300 * 32 * 4,
    )
    assert checkpoint.load_tokenizer().vocab_size == 300


def test_each_reading_is_a_fresh_array_and_nothing_is_kept(tmp_path):
    """As much memory for eight passes over a file as for one tensor of it."""
    weights = {f"w{i}": mx.random.normal((256, 1024), key=mx.random.key(i)) for i in range(16)}
    save_weights(tmp_path, weights)
    tensors = folder_tensors(tmp_path)
    assert mx.array_equal(tensors["w3"].read(), weights["w3"]) and tensors["w3"].read() is not tensors["w3"].read()
    del weights
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(8):
        for tensor in tensors.values():
            mx.eval(tensor.read())
    assert mx.get_active_memory() - before < 2 << 20
    assert mx.get_peak_memory() - before < 3 << 20  # of 16 MB


def test_a_part_of_a_model_by_itself(model_dir, tiny_config):
    checkpoint = open_checkpoint(model_dir)
    block = Decoder(tiny_config).layers[0]
    load_submodule(block, checkpoint.tensors, "model.layers.1")
    whole = load_model(model_dir)[0].layers[1]
    for (name, ours), (_, theirs) in zip(
        tree_flatten(block.parameters()), tree_flatten(whole.parameters()), strict=True
    ):
        assert mx.array_equal(ours, theirs), name
    assert not block.training


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "tensors a and b overlap"),
        ({"a": entry(0, 8, [True, 2])}, "an impossible shape"),
        ({"a": entry(0, 8, [2.0])}, "an impossible shape"),
        ({"a": entry(0, 0, [2**31, 0])}, "an impossible shape"),
        ({"a": entry(0, 4, [1] * 1000)}, r"an impossible shape: \[1, [1, ]{,50}, \.\.\.\]"),
        ({"a": entry(0, 8, [2**62, 2**62])}, "an impossible shape"),
        ({"a": entry(0, 12, [2])}, "has 12 bytes, its shape needs 8"),
        ({"a": entry(8, 0, [2])}, "has -8 bytes"),
        ({"a": entry(0.0, 8, [2])}, "no pair of offsets"),
        ({"a": entry(0, 80, [20])}, "truncated: tensor a ends"),
        ({"a": entry(0, 8, [8], "F8_E5M2")}, "a is of type F8_E5M2, which MLX doesn't read"),
        ({"a": entry(0, 8, [1], "F64")}, "a is of type F64"),
        ({"a": entry(0, 8, [1], ["F32"])}, "a is of type"),
        ({"a": [1]}, "a needs dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, "__metadata__ is not an object of strings"),
        (b'{"a": {}, "a": {}}', 'the safetensors header has "a" twice'),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 'has "dtype" twice'),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 100_000, "can't be read"),
        (b'{"a":' * 50_000, "can't be read"),
        (b'{"a": "\xff\xfe"}', "not UTF-8"),
        (b"{" + b",".join(b'"%d":0' % i for i in range(500_000)) + b"}", "more than 250000 values"),
        (b" " * 8_000_001, "at most 8000000 are possible"),
    ],
)
def test_headers_that_lie(tmp_path, header, expected):
    path = header_file(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=expected) as caught:
        file_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_odd_names_are_only_names(tmp_path):
    header = {"../../etc/passwd": entry(0, 4, [1]), "b": entry(4, 8, []), "empty": entry(8, 8, [0, 3])}
    tensors = file_tensors(header_file(tmp_path / "x.safetensors", header, bytes(8)))
    assert [tensor.read().shape for tensor in tensors.values()] == [(1,), (), (0, 3)]


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
def test_indexes_that_lie(model_dir, index, expected):
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


def test_many_files_have_no_more_tensors_than_one(tmp_path):
    """What each file may have isn't what a folder of them may have."""
    for shard in range(3):
        empty = {f"{shard}.{i}": entry(0, 0, [0]) for i in range(20_000)}
        header_file(tmp_path / f"model-0000{shard}-of-00003.safetensors", empty)
    with pytest.raises(
        CheckpointError, match="model-00002-of-00003.safetensors: the files up to this one have more tensors"
    ):
        folder_tensors(tmp_path)
    (tmp_path / "other").mkdir()
    index = {"weight_map": {f"w{i}": f"{i}.safetensors" for i in range(1001)}}
    (tmp_path / "other" / "model.safetensors.index.json").write_text(json.dumps(index))
    for i in range(1001):
        (tmp_path / "other" / f"{i}.safetensors").touch()
    with pytest.raises(CheckpointError, match="other: 1001 weight files"):
        folder_tensors(tmp_path / "other")


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


def test_a_run_with_a_pipe_for_its_state(tmp_path):
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    os.mkfifo(tmp_path / "checkpoints" / "step-2" / "state.json")
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text('{"validation_loss": 1.5}')
    assert best_checkpoint(tmp_path).name == "step-1"


def test_ggufs_beside_a_configuration(model_dir):
    """As the hub has them: config.json is that of the model they were made from."""
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\*.safetensors, pytorch_model\*.bin or .gguf file"):
        open_checkpoint(model_dir)
    (model_dir / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="a.gguf"):
        open_checkpoint(model_dir)
    (model_dir / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="several GGUF files .try: one of them: a.gguf, b.gguf"):
        open_checkpoint(model_dir)


def test_names_that_are_no_ids(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("models/typo.gguf", "a/b.safetensors", "a/model.bin"):
        with pytest.raises(CheckpointError, match=f"there is no file {name}"):
            open_checkpoint(name)
    with pytest.raises(CheckpointError, match="the model name is empty"):
        open_checkpoint("")


def test_a_tensor_with_and_without_its_prefix(model_dir):
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
def test_ends_of_the_generation_settings(model_dir, tiny_config, own, more, ends):
    values = {**config_to_hf(tiny_config), "eos_token_id": own}
    (model_dir / "config.json").write_text(json.dumps(values))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    assert open_checkpoint(model_dir).config.eos_token_id == ends


def test_special_tokens_beyond_the_model_that_no_text_becomes(model_dir, tiny_config, tiny_tokenizer):
    content, size = json.loads(tiny_tokenizer.to_json()), tiny_config.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": size, "content": "<image_soft_token>", "special": True, **flags})
    (model_dir / "tokenizer.json").write_text(json.dumps(content))
    lm = load(model_dir)
    assert lm.tokenizer.vocab_size == size + 1 and lm.tokenizer.min_vocab_size <= size
    assert open_base_model(model_dir)[1].vocab_size == size + 1
    config = SimpleNamespace(eos_ids=frozenset({1, size}), vocab_size=size)
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


def test_settings_that_are_no_tokens(model_dir):
    (model_dir / "generation_config.json").write_text(f'{{"eos_token_id": {2**40}}}')
    with pytest.raises(MlxlmError, match="eos_token_id is .*1099511627776"):
        open_checkpoint(model_dir)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(MlxlmError, match=r"generation_config.json: eos_token_id is \['x'\]"):
        open_checkpoint(model_dir)


def test_a_mark_of_windows_and_a_folder_for_a_file(model_dir):
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
        ("x.safetensors", b"", "one file of a model.*its folder"),
        ("x.txt", b"hello", "not a model"),
        ("empty", b"", "not a model"),
    ],
)
def test_files_that_are_no_models(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path / name)


def test_other_formats_go_to_their_readers(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.bin").write_bytes(b"\1\0\0\0")
    for path in (tmp_path / "a.gguf", tmp_path, tmp_path / "a.bin"):
        with pytest.raises(CheckpointError, match=r"a\.(gguf|bin)"):
            open_checkpoint(path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="several GGUF files.*a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_layers_that_a_configuration_invents(model_dir, tiny_config):
    values = {**config_to_hf(tiny_config), "num_hidden_layers": 9_999}
    (model_dir / "config.json").write_text(json.dumps(values))
    with pytest.raises(MlxlmError, match="model.layers.2 is missing"):
        open_checkpoint(model_dir)


def test_eight_bit_floats_are_for_mlx_lm(model_dir):
    """It has models that scale them; our decoder takes none."""
    path = model_dir / "model.safetensors"
    header = {"model.embed_tokens.weight": entry(0, 9600, [300, 32], "F8_E4M3")}
    assert file_tensors(header_file(path, header, bytes(9600)))["model.embed_tokens.weight"].dtype == mx.uint8
    values = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**values, "model_type": "deepseek_v3"}))
    assert "deepseek_v3" in open_checkpoint(model_dir).unsupported_reason
    layer = {f"model.layers.{i}.x": entry(9600, 9600, [0]) for i in range(2)}
    header_file(path, header | layer, bytes(9600))
    (model_dir / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="embed_tokens.weight is of type F8_E4M3, not floating-point"):
        open_checkpoint(model_dir)


def test_hub_ids_by_their_form():
    good = ["owner/name", "o/n@main", "mlx-community/Qwen3-0.6B-4bit", "a/b@refs/pr/3"]
    bad = ["name", "/owner/name", "./a/b", "../a/b", "a/b/c", "a/b@", "", "a//b", "~/x", "a/../b", "a b/c", "a/.."]
    assert all(hub.is_id(id) for id in good) and not any(hub.is_id(id) for id in bad)


@pytest.fixture
def cached(model_dir, tmp_path, monkeypatch):
    """The model in a cache as the hub's own tools leave it, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot = repository / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    for file in model_dir.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_model_in_the_hubs_cache(cached, model_dir):
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.path == cached
    tokens = mx.array([[1, 2]])
    np.testing.assert_array_equal(load_model("owner/name@main")[0](tokens), load_model(model_dir)[0](tokens))
    with pytest.raises(CheckpointError, match="neither a path nor in the cache.*HF_HUB_OFFLINE=0"):
        open_checkpoint("owner/other")
    (cached / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="owner/name has no safetensors and no PyTorch weights"):
        open_checkpoint("owner/name")


def test_a_path_wins_over_an_id(cached, tmp_path, model_dir):
    shutil.copytree(model_dir, tmp_path / "owner" / "name")
    assert str(open_checkpoint("owner/name").path) == "owner/name"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GatedRepoError", "owner/name@v2 is gated"),
        ("RepositoryNotFoundError", "there is no path owner/name@v2"),
        ("RevisionNotFoundError", "owner/name has no revision v2"),
        ("LocalEntryNotFoundError", "the hub can't be reached"),
        ("OfflineModeIsEnabled", "the hub can't be reached"),
        (None, "can't be downloaded: No space left on device"),
    ],
)
def test_what_the_hub_refuses(monkeypatch, kind, expected):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def refuse(repository, **options):
        asked.append((repository, options["revision"]))
        if kind is None:
            raise OSError("No space\nleft on device")
        made = getattr(huggingface_hub.errors, kind)
        raise made.__new__(made)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_checkpoint("owner/name@v2")
    assert asked == [("owner/name", "v2")] and "\n" not in str(caught.value)


def test_pytorchs_files_are_fetched_where_there_is_nothing_else(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(repository, revision, allow_patterns):
        asked.append(allow_patterns)
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.download("owner/name") == tmp_path
    assert "model*.safetensors" in asked[0] and "*.safetensors" not in asked[0]  # nor consolidated.safetensors
    assert not any("bin" in pattern for pattern in asked[0]) and len(asked) == 2
