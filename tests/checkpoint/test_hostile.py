"""Malicious files: each is one error that names the file and the field, quickly and in little memory."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from pathlib import Path

import pytest

from mlxlm.checkpoint import save_weights
from mlxlm.convert import convert
from mlxlm.utils.errors import MlxlmError
from tests.checkpoint.child_process import complaint
from tests.checkpoint.samples import KINDS, Sample, weights


@pytest.fixture
def is_one_error(valid_sample, child, tmp_path):
    """`is_one_error(kind, change, expected)`: a copy of a valid checkpoint, changed, is one error like `expected`."""
    count = 0

    def check(kind: str, change, expected: str) -> None:
        nonlocal count
        count += 1
        valid = valid_sample(kind)
        sample = valid.copy(tmp_path / f"damaged{count}")
        change(sample)
        result = child.open(sample.source, valid.source)
        assert complaint(result, f"damaged{count}") is None, result
        assert len(result["errors"]) == 1 and re.search(expected, result["errors"][0]), result

    return check


def in_target(change):
    """`change` of the bytes of a sample's first target."""

    def write(sample: Sample) -> None:
        target = sample.targets[0]
        target.write_bytes(change(target.read_bytes()))

    return write


def in_header(change):
    """`change` of the header of a safetensors file, as an object."""

    def write(data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        raw = json.dumps(header if changed is None else changed).encode()
        return struct.pack("<Q", len(raw)) + raw + data[8 + length :]

    return in_target(write)


def in_json(name: str, change):
    """`change` of the object in a JSON file of the folder."""

    def write(sample: Sample) -> None:
        path = sample.folder / name
        value = json.loads(path.read_text())
        changed = change(value)
        path.write_text(json.dumps(value if changed is None else changed))

    return write


def packed(at: int, form: str, *values: int):
    """Numbers written over the bytes of a sample's first target."""

    def write(data: bytes) -> bytes:
        result = bytearray(data)
        struct.pack_into("<" + form, result, at, *values)
        return bytes(result)

    return in_target(write)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files(valid_sample, is_one_error, kind):
    target = valid_sample(kind).targets[0]
    size = target.stat().st_size
    # A GGUF file ends with padding, SentencePiece's model with settings that may be absent, JSON with a line end.
    last = size - {"gguf": 40, "gguf-bpe": 40, "tokenizer-model": 40}.get(kind, 2)
    lengths = {0, 7, 23, 100, last // 3, last}
    for length in sorted(length for length in lengths if length <= last):
        is_one_error(kind, in_target(lambda data, length=length: data[:length]), target.name)


def empty_tensors(count: int) -> bytes:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(f'"t{i}":{entry}' for i in range(count)) + "}").encode()
    return struct.pack("<Q", len(header)) + header


SAFETENSORS = {
    "a shape larger than its bytes": (in_header(lambda h: h["model.norm.weight"].update(shape=[33])), "not a valid"),
    "an offset past the end": (
        in_header(lambda h: h["model.norm.weight"].update(data_offsets=[10**9, 10**9 + 128])), "`model.norm.weight`",
    ),
    "a header of 2**64 - 1 bytes": (packed(0, "Q", 2**64 - 1), "header too large"),
    "too many tensors": (in_target(lambda data: empty_tensors(150_000)), "the header has"),
    "many empty tensors": (in_target(lambda data: empty_tensors(45_000)), "the weights don't match"),
    "deep nesting": (in_target(lambda d: struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995), "recursion limit"),
    "a name that leads elsewhere": (
        in_header(lambda h: h.update({"../../x": h.pop("model.norm.weight")})), r"\.\./\.\./x is not part|is missing",
    ),
    "a name with a line end and colours": (
        in_header(lambda h: h.update({"x\n\x1b[31m": h.pop("model.norm.weight")})), "is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAFETENSORS)
def test_safetensors(is_one_error, case):
    is_one_error("safetensors", *SAFETENSORS[case])


def many_names() -> bytes:
    return ('{"weight_map":{' + ",".join(f'"t{i}":"a"' for i in range(300_000)) + "}}").encode()


SHARDS = {
    "a shard that is missing": (
        lambda s: sorted(s.folder.glob("model-*.safetensors"))[1].unlink(), "model-00002-of-.* is missing",
    ),
    "a name with ../": (
        in_json("model.safetensors.index.json", lambda v: v["weight_map"].update({"x": "../valid/model.safetensors"})),
        "index.json points outside its folder: ../valid",
    ),
    "an absolute name": (
        in_json("model.safetensors.index.json", lambda v: v["weight_map"].update({"x": "/etc/passwd"})),
        "index.json points outside its folder: /etc/passwd",
    ),
    "a name that is too long": (
        in_json("model.safetensors.index.json", lambda v: v["weight_map"].update({"x": "a" * 5000})), "index.json",
    ),
    "many names": (in_target(lambda data: many_names()), "index.json"),
    "a tensor that its shard hasn't": (
        in_json("model.safetensors.index.json", lambda v: v["weight_map"].update(
            {"model.norm.weight": v["weight_map"]["model.embed_tokens.weight"]})),
        "model.norm.weight is not in",
    ),
    "no object": (in_json("model.safetensors.index.json", lambda v: [1]), "index.json.*not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_shards(is_one_error, case):
    is_one_error("shards", *SHARDS[case])


CONFIGS = {
    "a layer too many": ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
    "a layer too few": ({"num_hidden_layers": 1}, "model.layers.1.*is not part of this model"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    "layers that overflow": ({"num_hidden_layers": 2**64}, "num_hidden_layers"),
    "another vocabulary": ({"vocab_size": 301}, r"embed_tokens.weight is \[300, 32\], .* says \[301, 32\]"),
    "a vocabulary of billions": ({"vocab_size": 2**31 - 1}, "embed_tokens.weight|parameters"),
    "a width of billions": ({"hidden_size": 2**30}, r"embed_tokens.weight is \[300, 32\]"),
    "heads that don't divide": ({"num_attention_heads": 5}, "num_key_value_heads 2 does not divide|no multiple"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "a text for a number": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "not a number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "an untied head that is missing": ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    "a quantization of 5000 bits": ({"quantization": {"bits": 5000, "group_size": 32}}, "bits is 5000"),
    "positions of billions": ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(is_one_error, case):
    change, expected = CONFIGS[case]
    is_one_error("config", in_json("config.json", lambda v: v.update(change)), expected)


QUANTIZED = {
    "bits that are no valid number": (
        in_json("config.json", lambda v: v["quantization"].update(bits=4.0)), "bits is 4.0",
    ),
    "other bits": (in_json("config.json", lambda v: v["quantization"].update(bits=8)), "bits"),
    "other groups": (in_json("config.json", lambda v: v["quantization"].update(group_size=64)), "group"),
    "bits that overflow": (in_json("config.json", lambda v: v["quantization"].update(bits=2**64)), "bits"),
    "no groups": (in_json("config.json", lambda v: v["quantization"].update(group_size=0)), "group_size is 0"),
    "scales that are missing": (
        in_header(lambda h: h.pop("model.layers.0.mlp.up_proj.scales") and None), "model.layers.0.mlp.up_proj",
    ),
    "scales of another shape": (
        in_header(lambda h: h["model.layers.0.mlp.up_proj.scales"]["shape"].reverse()), "model.layers.0.mlp.up_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized(is_one_error, case):
    is_one_error("quantized", *QUANTIZED[case])


def gguf_number(key: str, form: str, value: int):
    """The number after a key of the metadata (and its type, 4 bytes) set to `value`."""

    def write(data: bytes) -> bytes:
        at = data.index(key.encode()) + len(key) + 4
        return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize("<" + form) :]

    return in_target(write)


def gguf_tensor(name: str, form: str, value: int, skip: int):
    """A number of the tensor table set to `value`, `skip` bytes after a tensor's name."""

    def write(data: bytes) -> bytes:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + skip
        return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize("<" + form) :]

    return in_target(write)


def many_gguf_tensors(data: bytes) -> bytes:
    """A header that lists 100,000 tensors without values."""
    entry = struct.pack("<QIQIQ", 1, 1, 0, 0, 0)
    entries = b"".join(entry[:8] + b"x" + entry[8:] for _ in range(10**5))
    return b"GGUF" + struct.pack("<IQQ", 3, 10**5, 0) + entries


def long_gguf_array(data: bytes) -> bytes:
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    return data[:at] + struct.pack("<Q", 2**62) + data[at + 8 :]


# In a tensor's entry follow the name: dimensions (4 bytes), the size of each (8), the type (4), the offset (8).
GGUF = {
    "no magic": (packed(0, "I", 0), "GGUF"),
    "another version": (packed(4, "I", 99), "version"),
    "2**64 - 1 tensors": (packed(8, "Q", 2**64 - 1), "tensor"),
    "a million tensors": (packed(8, "Q", 10**6), "tensor|past the end"),
    "many tensors that are listed": (in_target(many_gguf_tensors), "tensor"),
    "2**64 - 1 keys": (packed(16, "Q", 2**64 - 1), "model.gguf"),
    "a name of 2**64 - 1 bytes": (packed(24, "Q", 2**64 - 1), "model.gguf"),
    "an array of 2**62 tokens": (in_target(long_gguf_array), "tokenizer.ggml.tokens"),
    "more layers than tensors": (gguf_number("llama.block_count", "I", 10**6), "model.layers|block_count|layers"),
    "a width of billions": (gguf_number("llama.embedding_length", "I", 2**31 - 1), "model.gguf"),
    "no heads": (gguf_number("llama.attention.head_count", "I", 0), "model.gguf.*head"),
    "an offset past the end": (gguf_tensor("output_norm.weight", "Q", 2**40, 16), "output_norm.weight"),
    "an offset that overflows": (gguf_tensor("output_norm.weight", "Q", 2**64 - 32, 16), "output_norm.weight"),
    "a size that overflows": (gguf_tensor("output_norm.weight", "Q", 2**63, 4), "output_norm.weight"),
    "another size": (gguf_tensor("output_norm.weight", "Q", 64, 4), "norm.weight"),
    "too many dimensions": (gguf_tensor("output_norm.weight", "I", 2**32 - 1, 0), "output_norm.weight"),
    "an unknown type": (gguf_tensor("output_norm.weight", "I", 999, 12), "output_norm.weight"),
    "a name that leads elsewhere": (
        in_target(lambda d: d.replace(b"output_norm.weight", b"../../../../../../x")), r"\.\./|norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF)
def test_gguf(is_one_error, case):
    is_one_error("gguf", *GGUF[case])


LLAMA2C = {
    "negative": -1, "none": 0, "a million": 10**6, "the largest": 2**31 - 1, "the smallest": -(2**31),
}  # fmt: skip
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")


@pytest.mark.parametrize("case", LLAMA2C)
def test_llama2c(is_one_error, case):
    for i, field in enumerate(FIELDS):
        if (case, field) == ("negative", "vocab_size"):
            continue  # an untied head, for one token
        is_one_error("llama2c", packed(4 * i, "i", LLAMA2C[case]), "model.bin")


def test_llama2c_tokenizers(is_one_error):
    is_one_error("llama2c-tokenizer", packed(8, "I", 2**32 - 1), "tokenizer.bin: token 0 is 4294967295 bytes long")
    is_one_error("llama2c-tokenizer", packed(0, "I", 0), "tokenizer.bin: token 0 .* max_token_length is 0")
    is_one_error("llama2c-tokenizer", packed(4, "f", float("nan")), "tokenizer.bin: the score of token 0 is nan")
    is_one_error("llama2c-tokenizer", lambda sample: sample.targets[0].unlink(), "no tokenizer beside .*model.bin")


class Payload:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("how", ["pickle", "zip", "safetensors", "gguf", "llama2c"])
def test_pickles_never_run(is_one_error, tmp_path, how):
    marker = tmp_path / "ran"
    payload = pickle.dumps({"model.norm.weight": Payload(marker)}, protocol=2)

    def change(sample: Sample) -> None:
        target = sample.targets[0]
        if how == "zip":
            with zipfile.ZipFile(target, "w") as archive:
                archive.writestr("pytorch_model/data.pkl", payload)
                archive.writestr("pytorch_model/version", b"3\n")
        else:
            target.write_bytes(payload)

    is_one_error({"pickle": "pytorch", "zip": "pytorch"}.get(how, how), change, "pytorch_model.bin|model.")
    assert not marker.exists()
    if how == "pickle":
        pickle.loads(payload)  # it does run with Python's unpickler
        assert marker.exists()


def in_pickle(*changes: tuple[bytes, bytes]):
    """Bytes of the pickle in a PyTorch file replaced, the archive valid."""

    def write(sample: Sample) -> None:
        target = sample.targets[0]
        with zipfile.ZipFile(target) as source:
            members = {name: source.read(name) for name in source.namelist()}
        name = next(name for name in members if name.endswith("data.pkl"))
        for old, new in changes:
            assert old in members[name]
            members[name] = members[name].replace(old, new, 1)
        with zipfile.ZipFile(target, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)

    return write


PYTORCH = {
    "another function": (in_pickle((b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem")), "pytorch_model.bin.*os"),
    "a class to be called": (in_pickle((b"collections\nOrderedDict", b"builtins\neval")), "pytorch_model.bin.*eval"),
    "a name with ../": (in_pickle((b"model.norm.weight", b"../../../../../x!")), r"\.\./|model.norm"),
    "storage that is missing": (in_pickle((b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00z")), "pytorch_model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTORCH)
def test_pytorch(is_one_error, case):
    is_one_error("pytorch", *PYTORCH[case])


def test_pytorch_zip_bomb(is_one_error):
    """220 MB of deflated zeros: nothing is inflated before its size is known."""

    def change(sample: Sample) -> None:
        with zipfile.ZipFile(sample.targets[0], "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("pytorch_model/data.pkl", bytes(220 << 20))

    is_one_error("pytorch", change, "pytorch_model.bin")


TOKENIZERS = {
    "an id of billions": (
        in_json("tokenizer.json", lambda v: v["model"]["vocab"].update({"x": 2**32 - 1})), "tokenizer.json.*id",
    ),
    "no model": (in_json("tokenizer.json", lambda v: v.pop("model") and None), "tokenizer.json has no field 'model'"),
    "a text for the vocabulary": (in_json("tokenizer.json", lambda v: v["model"].update(vocab="x")), "tokenizer.json"),
    "deep nesting": (lambda s: (s.folder / "tokenizer.json").write_text("[" * 10**6), "tokenizer.json"),
    "a number for a special token": (
        in_json("tokenizer_config.json", lambda v: v.update(bos_token=7)), "tokenizer_config.json: 'bos_token'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(is_one_error, case):
    is_one_error("tokenizer-json", *TOKENIZERS[case])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("config", "config.json"), ("shards", "model.safetensors.index.json"), ("tokenizer-json", "tokenizer.json"),
     ("tokenizer-json", "tokenizer_config.json"), ("tokenizer-model", "tokenizer.model"),
     ("llama2c-tokenizer", "tokenizer.bin")],
)  # fmt: skip
def test_huge_sparse_files(is_one_error, kind, name):
    """A sparse file of 3 GB."""

    def change(sample: Sample) -> None:
        with (sample.folder / name).open("wb") as file:
            file.truncate(3 << 30)

    is_one_error(kind, change, f"{name}.* bytes")


def test_sentencepiece_piece_of_a_megabyte(is_one_error):
    from sentencepiece import sentencepiece_model_pb2

    def change(data: bytes) -> bytes:
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)
        proto.pieces.add(piece="a" * 10**6, score=-1.0)
        return proto.SerializeToString()

    is_one_error("tokenizer-model", in_target(change), "tokenizer.model.*piece of more than")


@pytest.mark.parametrize("out", ["model", "model.gguf", "model.bin"])
def test_values_that_are_not_finite_are_not_written(valid_sample, tmp_path, out):
    sample = valid_sample("tokenizer-model").copy(tmp_path / "damaged")
    values = weights()
    values["model.norm.weight"] = values["model.norm.weight"] * float("nan")
    save_weights(sample.folder, values)
    (tmp_path / "out").mkdir()
    with pytest.raises(MlxlmError, match="norm.weight has values that are (not finite|NaN)"):
        convert(sample.source, tmp_path / "out" / out)
    assert list((tmp_path / "out").iterdir()) == []
