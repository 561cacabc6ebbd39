"""Damaged and malicious files: each is a checkpoint or one error that names the file and the field, quickly and in
little memory, and nothing in a file is executed.

`DAMAGE` is the table of formats and corruptions. Random ones come on top: MLXLM_FUZZ_CASES sets how many per format; a
case is seeded by its format and number, so it is the same everywhere.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import struct
import zipfile
from pathlib import Path

import pytest

from tests.checkpoint.child_process import complaint
from tests.checkpoint.damage import gguf_tensor, in_header, in_json, in_pickle, in_target, mutated, packed
from tests.checkpoint.raw_files import Raw, archive, array, entry, header_file, small_llama, state, text
from tests.checkpoint.samples import KINDS, Sample

CASES = int(os.environ.get("MLXLM_FUZZ_CASES", "10"))


def content(raw: bytes):
    return in_target(lambda data: raw)


def safetensors(header: dict | bytes, nbytes: int):
    return lambda sample: header_file(sample.targets[0], header, bytes(nbytes))


def pytorch(raw: bytes, records: dict | None = None, **options):
    return lambda sample: archive(sample.targets[0], raw, records or {}, **options)


def view(*storage):
    """A tensor `a` in a storage of 12 numbers."""
    return pytorch(state({"a": storage}), {"0": bytes(48)})


def replaced(old: bytes, new: bytes):
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return in_target(change)


def view_pickle(count: int, stored: int = 12) -> bytes:
    """The pickle of a tensor `a` of `count` numbers in a storage of `stored`."""
    return state({"a": ("FloatStorage", "0", stored, 0, (count,), (1,))})


def gguf(raw: Raw):
    return lambda sample: raw.write(sample.targets[0])


def gguf_llama(change: dict, remove=()):
    return lambda sample: small_llama(sample.folder, dict(change), remove).rename(sample.targets[0])


def index(change):
    return in_json("model.safetensors.index.json", change)


def listed(name: str, file):
    return index(lambda v: v["weight_map"].update({name: file}))


def config(**change):
    return in_json("config.json", lambda v: v.update(change))


def quantization(**change):
    return in_json("config.json", lambda v: v["quantization"].update(change))


def empty_tensors(count: int) -> bytes:
    header = "{" + ",".join(f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count)) + "}"
    return struct.pack("<Q", len(header)) + header.encode()


def zip_bomb(sample: Sample) -> None:
    """220 MB of deflated zeros: nothing is inflated before its size is known."""
    with zipfile.ZipFile(sample.targets[0], "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("pytorch_model/data.pkl", bytes(220 << 20))


def without_pickle(sample: Sample) -> None:
    with zipfile.ZipFile(sample.targets[0], "w") as file:
        file.writestr("other/text", "x")


def sparse(name: str):
    """A sparse file of 3 GB."""

    def change(sample: Sample) -> None:
        with (sample.folder / name).open("wb") as file:
            file.truncate(3 << 30)

    return change


def long_piece(data: bytes) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    proto.pieces.add(piece="a" * 10**6, score=-1.0)
    return proto.SerializeToString()


def repeated(unit: bytes, count: int) -> bytes:
    return b"\x80\x02" + unit * count + b"."


NESTED = array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(4, 1, bytes(4))))))
FLOATS = ("FloatStorage", "0", 12)
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
LEGACY_START = MAGIC + b"\x80\x02M\xe9\x03." + b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s."
ONE_KEY = b"\x80\x02](X\x01\x00\x00\x000e."
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj"
OUTSIDE = "index.json points outside its folder: "

# Kind of checkpoint -> what is done to it and the error that must follow; a key only tells two cases apart.
DAMAGE = {
    "safetensors": [
        (in_header(lambda h: h[NORM].update(shape=[33])), "not a valid"),
        (in_header(lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 128])), f"`{NORM}`"),
        (content(empty_tensors(150_000)), "the header has"),
        (content(empty_tensors(45_000)), "the weights don't match"),
        (in_header(lambda h: h.update({"../../x": h.pop(NORM)})), r"\.\./\.\./x is not part|is missing"),
        (in_header(lambda h: h.update({"x\n\x1b[31m": h.pop(NORM)})), "is missing"),
        (safetensors({"a": entry(0, 0, [2**31, 0])}, 0), "a has an impossible shape"),
        (safetensors({"a": entry(0, 4, [1] * 1000)}, 4), r"an impossible shape: \[1, [1, ]{,50}, \.\.\.\]"),
        (safetensors({"a": entry(0, 8, [8], "F8_E5M2")}, 8), "a is of type F8_E5M2, which MLX doesn't read"),
        (safetensors({"a": entry(0, 8, [1], "F64")}, 8), "a is of type F64"),
        (safetensors(b'{"a": {"dtype": "' + b"F" * 100_000 + b'"}}', 0), "is not a valid safetensors file: .{,250}$"),
        (safetensors(b" " * 8_000_001, 0), "at most 8000000 are possible"),
    ],
    "shards": [
        (lambda s: sorted(s.folder.glob("model-*.safetensors"))[1].unlink(), "model-00002-of-.* is missing"),
        *((listed("x", name), OUTSIDE) for name in ("../valid/model.safetensors", "/etc/passwd", "..")),
        (listed("x", "a" * 5000), "index.json"),
        (listed("x", "gone.safetensors"), "gone.safetensors is missing"),
        (listed("x", 3), "weight_map is not an object of file names"),
        (index(lambda v: {"weight_map": []}), "weight_map is not an object of file names"),
        (content(b'{"weight_map":{' + b",".join(b'"t%d":"a"' % i for i in range(300_000)) + b"}}"), "index.json"),
        (index(lambda v: v["weight_map"].update({NORM: v["weight_map"]["model.embed_tokens.weight"]})),
         f"{NORM} is not in"),
        (index(lambda v: [1]), "index.json.*not a JSON object"),
        (sparse("model.safetensors.index.json"), "model.safetensors.index.json has .* GB, the limit"),
    ],
    "config": [
        (config(num_hidden_layers=3), "model.layers.2.* is missing"),
        (config(num_hidden_layers=1), "model.layers.1.*is not part of this model"),
        (config(num_hidden_layers=10**6), "num_hidden_layers"),
        (config(num_hidden_layers=2**64), "num_hidden_layers"),
        (config(vocab_size=301), r"embed_tokens.weight is \[300, 32\], .* says \[301, 32\]"),
        (config(vocab_size=2**31 - 1), "embed_tokens.weight|parameters"),
        (config(hidden_size=2**30), r"embed_tokens.weight is \[300, 32\]"),
        (config(tie_word_embeddings=False), "lm_head.weight is missing"),
        (config(quantization={"bits": 5000, "group_size": 32}), "bits is 5000"),
        (sparse("config.json"), "config.json has .* GB, the limit"),
    ],
    "quantized": [
        (quantization(bits=8), "bits"),
        (quantization(group_size=64), "group"),
        (quantization(bits=2**64), "bits"),
        (in_header(lambda h: h.pop(f"{UP}.scales") and None), UP),
        (in_header(lambda h: h[f"{UP}.scales"]["shape"].reverse()), UP),
    ],
    "pytorch": [
        (in_pickle((b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem")), "pytorch_model.bin.*os"),
        (in_pickle((NORM.encode(), b"../../../../../x!")), r"\.\./|model.norm"),
        (in_pickle((b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00z")), "pytorch_model.bin"),
        (zip_bomb, "pytorch_model.bin"),
        (view(*FLOATS, 9, (4,), (1,)), "a exceeds its storage"),
        (view(*FLOATS, 0, (3, 4), (5, 1)), "a exceeds its storage"),
        (view("FloatStorage", "0", 13, 0, (13,), (1,)), "a exceeds its storage"),
        (view(*FLOATS, 0, (2**30, 2**30), (0, 0)), "a has elements that share memory"),
        (view(*FLOATS, 0, (2, 2), (1,)), "a has impossible shape and strides"),
        (view(*FLOATS, -1, (2,), (1,)), "a has impossible shape and strides"),
        (view(*FLOATS, 0, (-2,), (1,)), "a has impossible shape and strides"),
        (view("FloatStorage", "7", 12, 0, (2,), (1,)), "a is in storage 7, which is missing"),
        (view("QInt8Storage", "0", 12, 0, (2,), (1,)), "refers to torch.QInt8Storage"),
        (pytorch(state({"a": (*FLOATS, 0, (12,), (1,))}), {"0": bytes(48)}, compression=zipfile.ZIP_DEFLATED),
         "archive/data.pkl is compressed"),
        (content(MAGIC), "pytorch_model.bin: unsupported pickle: it is cut off"),
        (content(b"PK\x03\x04 and no more"), "not a complete PyTorch file"),
        (without_pickle, "no data.pkl"),
        *((pytorch(raw), f"unsupported pickle.*({expected})") for raw, expected in (
            (b"cos\nsystem\n(S'true'\ntR.", "refers to os.system"),
            (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "refers to builtins.eval"),
            (b"\x80\x02\x8b\xff\xff\xff\x7f.", "LONG4|operation"),
            (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "operation"),
            (b"\x80\x02X\xff\xff\xff\xffabc.", "cut off"),
            (b"\x80\x02}r\xff\xff\xff\xff.", "no dictionary of tensors"),
            (repeated(b"(", 20_000), "no dictionary of tensors|malformed"),
            (b"\x80\x02)" + b"2\x86" * 100 + b".", "operation"),
            (b"\x80\x02)q\x00" + b"h\x00\x86q\x00" * 200 + b".", "no dictionary of tensors"),
            (b"\x80\x04)q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"h\x00\x93.", "malformed"),
            (b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"Ns.", "malformed"),
            (b"", "cut off"),
            (b"t.", "cut off|malformed"),
            (b"\x80\x02]q\x00h\x00a.", "no dictionary of tensors"),
            (b"\x80\x02}J\xff\xff\xff\xffNs.", "malformed"),
            (b"\x80\x02}\x8a\x04\x00\x00\x00\x80Ns.", "malformed"),
            (repeated(b"]", 700_000), "more than 700000 reads"),
        )),
    ],
    "pytorch-legacy": [
        (replaced(b"ctorch._utils\n_rebuild_tensor_v2", b"cos\nsystem"), "refers to os.system"),
        (replaced(MAGIC, MAGIC[:4] + b"m" + MAGIC[5:]), "not of version 1001 of the format before PyTorch 1.6"),
        (replaced(b"\x80\x02M\xe9\x03.", b"\x80\x02M\xea\x03."), "not of version 1001"),
        (replaced(b"little_endianq\x02\x88", b"little_endianq\x02\x89"), "big-endian"),
        (replaced(struct.pack("<q", 32), struct.pack("<q", 33)), "has 33 elements, its tensors say 32"),
        (replaced(struct.pack("<q", 32), b"\xff" * 8), "elements, its tensors say 32"),
        (in_target(lambda data: data[:-4]), "is truncated: storage .* is cut off"),
        (content(MAGIC + b"\x80\x02M\xe9\x03." + b"\x80\x02}."), "big-endian"),
        (content(LEGACY_START + view_pickle(12) + b"\x80\x02]."), "a is in storage 0, which is missing"),
        (content(LEGACY_START + view_pickle(12) + b"\x80\x02](X\x01\x00\x00\x001e."), "list of storages"),
        (content(LEGACY_START + view_pickle(12) + ONE_KEY + struct.pack("<q", 12) + bytes(47)), "0 is cut off"),
        (content(LEGACY_START + view_pickle(12, 2**31 - 1) + ONE_KEY + bytes(8)), "0 is cut off"),
        (content(LEGACY_START + view_pickle(13) + ONE_KEY + struct.pack("<q", 12) + bytes(48)), "a exceeds its stora"),
        (content(LEGACY_START + repeated(b"]", 700_000)), "more than 700000 reads"),
    ],
    "gptq": [
        (in_header(lambda h: h.update(other=h.pop(f"{UP}.qzeros"))), f"{UP} has no qzeros"),
        (in_header(lambda h: h[f"{UP}.qweight"]["shape"].reverse()), UP),
    ],
    "gguf": [
        # In a tensor's entry follow the name: dimensions (4 bytes), the size of each (8), the type (4), the offset (8).
        (gguf_tensor("output_norm.weight", "Q", 64, 4), "norm.weight"),
        (gguf_tensor("output_norm.weight", "Q", 2**64 - 32, 16), "output_norm.weight"),
        (in_target(lambda d: d.replace(b"output_norm.weight", b"../../../../../../x")), r"\.\./|norm"),
        *((gguf(raw), message) for raw, message in (
            (Raw(magic=b"GGML"), "not a GGUF file"),
            (Raw(version=1), "version 1 is not supported"),
            (Raw(version=3 << 24), "is big-endian"),
            (Raw(tensors=1_000_000), "claims 1000000 tensors"),
            (Raw(tensors=2**64 - 1), "claims 18446744073709551615 tensors"),
            (Raw(keys=2**63), "claims 9223372036854775808 metadata"),
            (Raw(tensors=30_000), "the name of tensor 0 is ''"),
            (Raw().key("k" * 2000, 4, bytes(4)), "the key of metadata value 0 claims"),
            (Raw().key("a\x1b[2J", 4, bytes(4)), r"'a\\x1b.*is not a name"),
            (Raw().key("a.b", 4, bytes(4)).key("a.b", 4, bytes(4)), "a.b occurs twice"),
            (Raw().key("a.b", 13, bytes(4)), "a.b has the unknown type 13"),
            (Raw().key("a.b", 7, b"\x02"), "a.b is 2, which is neither true"),
            (Raw().key("a.b", 8, struct.pack("<Q", 2**63)), "a.b claims 9223372036854775808 bytes"),
            (Raw().key("a.b", 8, struct.pack("<Q", 10_000)), "a.b ends past the end"),
            (Raw().key("a.n", 9, array(6, 2**62)), "a.n ends past the end"),
            (Raw().key("a.s", 9, array(8, 2**62)), "a.s claims 4611686018427387904 elements"),
            (Raw().key("a.s", 9, array(8, 2, struct.pack("<Q", 2**60))), "a.s ends past the end"),
            (Raw().key("a.u", 9, array(77, 1)), "a.u is an array of the unknown type 77"),
            (Raw().key("a.d", 9, NESTED), "a.d has more than 4 nested arrays"),
            (Raw().key("general.alignment", 4, struct.pack("<I", 33)), "general.alignment is 33"),
            (Raw().key("general.alignment", 4, bytes(4)), "general.alignment is 0"),
            (Raw().key("general.alignment", 8, text("32")), "general.alignment is not a number"),
            (Raw().tensor(shape=()), "tensor x has 0 dimensions"),
            (Raw().tensor(shape=(1,) * 5), "tensor x has 5 dimensions"),
            (Raw().tensor(shape=(0, 4)), r"tensor x is \[4, 0\]"),
            (Raw().tensor(shape=(2**40, 2**40)), r"tensor x is \[\d+, \d+\]"),
            (Raw().tensor(shape=(255, 2), kind=12), "tensor x is .*Q4_K are multiples of 256"),
            (Raw().tensor(kind=4), "tensor x is of type 4,"),
            (Raw().tensor(kind=28), "tensor x is of type 28,"),
            (Raw().tensor().tensor(offset=64), "tensor x occurs twice"),
            (Raw().tensor(offset=7), "tensor x begins at 7,"),
            (Raw().tensor(offset=32), "tensor x ends 32 bytes past"),
            (Raw().tensor(offset=2**63), "tensor x ends .* bytes past"),
            (Raw().tensor().tensor("y", shape=(2,), offset=32), "tensors x and y overlap"),
        )),
        *((gguf_llama(change), message) for change, message in (
            ({"general.architecture": "mamba"}, "'mamba'.*one of llama"),
            ({"llama.expert_count": 8}, "lacks llama.expert_used_count"),
            ({"llama.block_count": 2**32 - 1}, "block_count"),
            ({"llama.block_count": 2**30}, "block_count is 1073741824, there are 11 tensors"),
            ({"llama.block_count": 2}, "layers.1 is missing"),
            ({"llama.block_count": "many"}, "block_count must be a whole number"),
            ({"llama.embedding_length": 5}, "embedding_length is 5"),
            ({"llama.feed_forward_length": 7}, "config"),
            ({"llama.attention.head_count": 0}, "head_count 0"),
            ({"llama.attention.head_count": 3}, "head_dim 1 is odd"),
            ({"llama.attention.head_count_kv": array(4, 2, struct.pack("<II", 1, 2))}, "has 2 values, one for each"),
            ({"llama.attention.head_count_kv": array(8, 1, bytes(8))}, "must be a whole number"),
            ({"llama.attention.value_length": 1}, "value_length differs"),
            ({"llama.rope.scaling.type": "su"}, "'su'"),
            ({"split.count": 3}, "split.count is 3, which doesn't match"),
            ({"split.count": "three"}, "split.count is not a number"),
        )),
        (gguf_llama({}, {"llama.context_length"}), r"lacks llama\.context_length"),
    ],
    "llama2c": [
        *((packed(at, "i", value), f"model.bin.*({expected})") for at, value, expected in (
            (0, 3, "not a multiple of n_heads"),
            (0, -32, "dim is -32"),
            (4, 2**31 - 1, "is truncated|parameters"),
            (8, 1_000_000, "n_layers is 1000000, more than"),
            (8, 0, "n_layers is 0"),
            (12, 3, "dim 32 is not a multiple of n_heads 3"),
            (16, 3, "num_key_value_heads 3 does not divide"),
            (20, -(2**31), "work: vocab_size"),
            (24, 2**31 - 1, "rotary table ends"),
            (0, 0x616B3432, "has a format that run.c doesn't read.*--version 0"),
        )),
        *((packed(4 * field, "i", value), "model.bin") for field in range(6)
          for value in (-1, 0, 10**6, 2**31 - 1, -(2**31)) if (field, value) != (5, -1)),  # an untied head
        *((in_target(lambda data, n=n: data[:n]), "model.bin is truncated") for n in (0, 4, 27, 30, 5000, -1)),
        (in_target(lambda data: data + b"\0"), "its header says"),
        (lambda sample: (sample.folder / "tokenizer.bin").unlink(), "no tokenizer next to .*model.bin"),
    ],
    "llama2c-tokenizer": [
        (content(b"\0\0"), "ends before max_token_length"),
        (in_target(lambda data: data[:-1]), "token 299 is .* bytes long.* left"),
        (in_target(lambda data: data + b"\0"), "has data after token 299"),
        (packed(0, "I", 0), "token 0 .* max_token_length is 0"),
        (packed(0, "I", 1), "token 0 is 5 bytes long, max_token_length is 1"),
        (packed(4, "f", float("nan")), "score of token 0 is nan"),
        (packed(8, "I", 2**32 - 1), "token 0 is 4294967295 bytes long"),
        (in_target(lambda data: data[:-1] + b"\xff"), "token 299 is not UTF-8"),
        (in_target(lambda data: data.replace(b"<0x41>", b"<0x42>")), "token 68 is '<0x42>', run.c needs '<0x41>'"),
        (sparse("tokenizer.bin"), "tokenizer.bin has .* bytes, too many"),
    ],
    "tokenizer-json": [
        (in_json("tokenizer.json", lambda v: v["model"]["vocab"].update({"x": 2**32 - 1})), "tokenizer.json.*id"),
        (in_json("tokenizer.json", lambda v: v.pop("model") and None), "tokenizer.json has no field 'model'"),
        (in_json("tokenizer.json", lambda v: v["model"].update(vocab="x")), "tokenizer.json"),
        (content(b"[" * 10**6), "tokenizer.json"),
        (in_json("tokenizer_config.json", lambda v: v.update(bos_token=7)), "tokenizer_config.json: 'bos_token'"),
        (sparse("tokenizer.json"), "tokenizer.json has .* GB, the limit"),
        (sparse("tokenizer_config.json"), "tokenizer_config.json has .* GB, the limit"),
    ],
    "tokenizer-model": [
        (in_target(long_piece), "tokenizer.model.*piece of more than"),
        (sparse("tokenizer.model"), "tokenizer.model has .* GB, the limit"),
    ],
}  # fmt: skip


@pytest.fixture
def open_damaged(valid_sample, child, tmp_path):
    """`open_damaged(kind, change)`: what the child process says about a copy of a valid checkpoint, changed."""

    def check(kind: str, change) -> dict:
        valid = valid_sample(kind)
        sample = valid.copy(tmp_path / "damaged" / kind)
        change(sample)
        result = child.open(sample.source, valid.source)
        assert complaint(result, "damaged") is None, result
        return result

    (tmp_path / "damaged").mkdir()
    return check


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, i) for kind in DAMAGE for i in range(len(DAMAGE[kind]))], ids=lambda value: str(value)
)
def test_a_damaged_file_is_one_error(open_damaged, kind, case):
    change, expected = DAMAGE[kind][case]
    result = open_damaged(kind, change)
    assert len(result["errors"]) == 1 and re.search(expected, result["errors"][0]), result


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_and_random_files_are_checkpoints_or_one_error(tmp_path, valid_sample, child, kind):
    valid = valid_sample(kind)
    damaged = valid.copy(tmp_path / "damaged")
    originals = {target: target.read_bytes() for target in damaged.targets}
    first = damaged.targets[0]
    # A GGUF file ends with padding, SentencePiece's model with settings that may be absent, JSON with a line end.
    last = len(originals[first]) - {"gguf": 40, "gguf-bpe": 40, "tokenizer-model": 40}.get(kind, 2)
    lengths = sorted({0, 4, 7, 23, 27, 100, last // 3, last // 2, last} - set(range(last + 1, 101)))
    cases = [(f"truncated to {length}", first, originals[first][:length]) for length in lengths]
    for case in range(CASES):
        rng = random.Random(f"{kind} {case}")
        target = rng.choice(damaged.targets)
        cases.append((f"random {case}", target, mutated(originals[target], target.name, rng)))
    complaints = []
    for case, target, data in cases:
        target.write_bytes(data)
        result = child.open(damaged.source, valid.source)
        target.write_bytes(originals[target])
        problem = complaint(result, "damaged")
        if case.startswith("truncated") and not problem:
            named = len(result["errors"]) == 1 and target.name in result["errors"][0]
            problem = None if named else f"not one error that names the file: {result['errors']}"
        complaints += [f"{kind} {case}: {target.name}: {problem}"] if problem else []
    assert not complaints, "\n".join(complaints)


class Payload:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("how", ["pickle", "zip", "safetensors", "gguf", "llama2c"])
def test_pickles_never_run(open_damaged, tmp_path, how):
    marker = tmp_path / "ran"
    payload = pickle.dumps({NORM: Payload(marker)}, protocol=2)
    change = pytorch(payload) if how == "zip" else content(payload)
    result = open_damaged({"pickle": "pytorch", "zip": "pytorch"}.get(how, how), change)
    assert len(result["errors"]) == 1 and re.search("pytorch_model.bin|model.", result["errors"][0])
    assert not marker.exists()
    if how == "pickle":
        pickle.loads(payload)  # it does run with Python's unpickler
        assert marker.exists()
