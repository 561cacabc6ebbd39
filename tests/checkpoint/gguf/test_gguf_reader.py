"""Headers: against the gguf package's writer and reader, split files, and files that lie."""

from __future__ import annotations

import struct
import time
import tracemalloc

import gguf as oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.reader import Array, read_header
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of

NUMBERS = {
    oracle.GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    oracle.GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    oracle.GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    oracle.GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    oracle.GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    oracle.GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    oracle.GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    oracle.GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    oracle.GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    oracle.GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    oracle.GGUFValueType.BOOL: st.booleans(),
    oracle.GGUFValueType.STRING: st.text(max_size=20),
}
SCALARS = st.one_of(*(values.map(lambda v, kind=kind: (kind, v)) for kind, values in NUMBERS.items()))
ARRAYS = st.one_of(
    *(st.lists(values, min_size=1, max_size=5).map(lambda v, kind=kind: (kind, v)) for kind, values in NUMBERS.items())
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scalars=st.lists(SCALARS, max_size=6),
    arrays=st.lists(ARRAYS, max_size=4),
    shapes=st.lists(SHAPES, max_size=5),
    alignment=st.sampled_from([8, 32, 64, 4096]),
)
def test_headers_of_the_gguf_package(scalars, arrays, shapes, alignment, tmp_path):
    path = tmp_path / "m.gguf"
    writer = oracle.GGUFWriter(path, "test")
    writer.add_custom_alignment(alignment)
    for i, (kind, value) in enumerate(scalars):
        writer.add_key_value(f"scalar.{i}", value, kind)
    for i, (kind, value) in enumerate(arrays):
        writer.add_key_value(f"array.{i}", value, oracle.GGUFValueType.ARRAY, sub_type=kind)
    for i, shape in enumerate(shapes):
        writer.add_tensor(f"tensor.{i}", np.full(shape, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.metadata["general.alignment"] == alignment
    for i, (_, value) in enumerate(scalars):
        assert header.metadata[f"scalar.{i}"] == value
    for i, (_, value) in enumerate(arrays):
        assert header.metadata[f"array.{i}"].read() == value
    content = path.read_bytes()
    for i, shape in enumerate(shapes):
        info = header.tensors[f"tensor.{i}"]
        assert info.shape == tuple(shape) and info.offset % alignment == 0
        data = np.frombuffer(content, np.float32, info.nbytes // 4, info.offset)
        assert (data == i).all()


def test_our_files_in_the_gguf_package(tiny_tokenizer, tmp_path):
    model = random_model("llama-3", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F16")
    theirs, ours = oracle.GGUFReader(tmp_path / "m.gguf"), read_header(tmp_path / "m.gguf")
    metadata = {name: theirs.get_field(name).contents() for name in theirs.fields if not name.startswith("GGUF.")}
    read = {name: value.read() if isinstance(value, Array) else value for name, value in ours.metadata.items()}
    assert metadata == read
    offsets = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in theirs.tensors}
    assert offsets == {name: (info.offset, info.nbytes) for name, info in ours.tensors.items()}


class Raw:
    """A GGUF file from its parts, right or wrong."""

    def __init__(self, version=3, tensors=None, keys=None, magic=b"GGUF"):
        self.version, self.tensor_count, self.key_count, self.magic = version, tensors, keys, magic
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []

    def key(self, name: str, kind: int, value: bytes):
        self.keys.append(text(name) + struct.pack("<I", kind) + value)
        return self

    def tensor(self, name="x", shape=(4, 4), kind=0, offset=0, rank=None):
        dims = struct.pack(f"<I{len(shape)}Q", len(shape) if rank is None else rank, *shape)
        self.tensors.append(text(name) + dims + struct.pack("<IQ", kind, offset))
        return self

    def write(self, path, data=bytes(64)):
        given = ((self.tensors, self.tensor_count), (self.keys, self.key_count))
        counts = [len(parts) if count is None else count for parts, count in given]
        header = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join(self.keys + self.tensors)
        path.write_bytes(header + bytes(-len(header) % 32) + data)
        return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


NESTED = array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(4, 1, bytes(4))))))
HOSTILE = {
    "not a GGUF file": Raw(magic=b"GGML"),
    "version 1 is not supported": Raw(version=1),
    "is big-endian": Raw(version=3 << 24),
    "claims 1000000 tensors": Raw(tensors=1_000_000),
    r"claims 18446744073709551615 tensors": Raw(tensors=2**64 - 1),
    r"claims 9223372036854775808 metadata": Raw(keys=2**63),
    "the name of tensor 0 is ''": Raw(tensors=30_000),
    "the key of metadata value 0 claims": Raw().key("k" * 2000, 4, bytes(4)),
    "'a\\\\x1b.*is no name": Raw().key("a\x1b[2J", 4, bytes(4)),
    "a.b is there twice": Raw().key("a.b", 4, bytes(4)).key("a.b", 4, bytes(4)),
    "a.b has the unknown type 13": Raw().key("a.b", 13, bytes(4)),
    "a.b is 2, which is neither true": Raw().key("a.b", 7, b"\x02"),
    "a.b claims 9223372036854775808 bytes": Raw().key("a.b", 8, struct.pack("<Q", 2**63)),
    "a.b ends past the end": Raw().key("a.b", 8, struct.pack("<Q", 10_000)),
    "a.n ends past the end": Raw().key("a.n", 9, array(6, 2**62)),
    "a.s claims 4611686018427387904 elements": Raw().key("a.s", 9, array(8, 2**62)),
    "a.s ends past the end": Raw().key("a.s", 9, array(8, 2, struct.pack("<Q", 2**60))),
    "a.u is an array of the unknown type 77": Raw().key("a.u", 9, array(77, 1)),
    "a.d has more than 4 arrays": Raw().key("a.d", 9, NESTED),
    "general.alignment is 33": Raw().key("general.alignment", 4, struct.pack("<I", 33)),
    "general.alignment is 0": Raw().key("general.alignment", 4, bytes(4)),
    "general.alignment is no number": Raw().key("general.alignment", 8, text("32")),
    "tensor x has 0 dimensions": Raw().tensor(shape=()),
    "tensor x has 5 dimensions": Raw().tensor(shape=(1,) * 5),
    r"tensor x is \[4, 0\]": Raw().tensor(shape=(0, 4)),
    r"tensor x is \[\d+, \d+\]": Raw().tensor(shape=(2**40, 2**40)),
    "tensor x is .*Q4_K are multiples of 256": Raw().tensor(shape=(255, 2), kind=12),
    "tensor x is of type 4,": Raw().tensor(kind=4),
    "tensor x is of type 28,": Raw().tensor(kind=28),
    "tensor x is there twice": Raw().tensor().tensor(offset=64),
    "tensor x begins at 7,": Raw().tensor(offset=7),
    "tensor x ends 32 bytes past": Raw().tensor(offset=32),
    "tensor x ends .* bytes past": Raw().tensor(offset=2**63),
    "tensors x and y overlap": Raw().tensor().tensor("y", shape=(2,), offset=32),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_headers(message, tmp_path):
    path = HOSTILE[message].write(tmp_path / "m.gguf")
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    taken, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert taken < 1 and peak < 50e6


def test_the_largest_header_that_is_walked_takes_less_than_a_second(tmp_path):
    """Two million strings and 32,768 tensors, of which the last is wrong."""
    raw = Raw().key("a.s", 9, array(8, 2**21, bytes(2**24)))
    for i in range(2**15 - 1):
        raw.tensor(f"t{i}", (1,), offset=32 * i)
    raw.tensor("last", (1,), kind=99)
    path = raw.write(tmp_path / "m.gguf", bytes(32 * 2**15))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="tensor last is of type 99"):
        read_header(path)
    assert time.process_time() - start < 2  # a second on an idle machine


def test_every_truncation_is_noticed(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, len(content) - 32, 1009), len(content) - 32]:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="past the end|not a whole|more than the file"):
            open_checkpoint(cut)


def rewritten(tmp_path, change: dict, remove=()):
    """A small Llama with other values in its metadata."""
    path = tmp_path / "m.gguf"
    raw = Raw()
    fixed = {
        "llama.embedding_length": 4, "llama.block_count": 1, "llama.attention.head_count": 2,
        "llama.feed_forward_length": 4, "llama.context_length": 8,
    }  # fmt: skip
    raw.key("general.architecture", 8, text(change.pop("general.architecture", "llama")))
    raw.key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))
    for name, value in {**fixed, **change}.items():
        if name in remove:
            continue
        if isinstance(value, bytes):
            raw.key(name, 9, value)
        elif isinstance(value, str):
            raw.key(name, 8, text(value))
        else:
            raw.key(name, 4, struct.pack("<I", value))
    shapes = {"token_embd.weight": (4, 8), "output_norm.weight": (4,)}
    layer = {"attn_norm": (4,), "ffn_norm": (4,), "attn_q": (4, 4), "attn_k": (4, 4), "attn_v": (4, 4)}
    layer |= {name: (4, 4) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    for i, (name, shape) in enumerate(shapes.items()):
        raw.tensor(name, shape, offset=128 * i)
    return raw.write(path, bytes(128 * len(shapes)))


def test_the_small_llama_opens(tmp_path):
    assert open_checkpoint(rewritten(tmp_path, {})).config.hidden_size == 4
    same_for_all = {"llama.attention.head_count_kv": array(4, 1, struct.pack("<I", 2))}
    assert open_checkpoint(rewritten(tmp_path, same_for_all)).config.num_key_value_heads == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"general.architecture": "mamba"}, "'mamba'.*one of llama, qwen2"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.block_count": 2**32 - 1}, "block_count"),
        ({"llama.block_count": 2**30}, "block_count is 1073741824, there are 11 tensors"),
        ({"llama.block_count": 2}, "layers.1 is missing"),
        ({"llama.block_count": "many"}, "block_count must be a whole number"),
        ({"llama.embedding_length": 5}, "embedding_length says 5"),
        ({"llama.feed_forward_length": 7}, "config"),
        ({"llama.attention.head_count": 0}, "head_count 0"),
        ({"llama.attention.head_count": 3}, "head_dim 1 is odd"),
        ({"llama.attention.head_count_kv": array(4, 2, struct.pack("<II", 1, 2))}, "differs between the layers"),
        ({"llama.attention.head_count_kv": array(8, 1, bytes(8))}, "must be a whole number"),
        ({"llama.attention.value_length": 1}, "value_length differs"),
        ({"llama.rope.scaling.type": "su"}, "'su'"),
        ({"split.count": 3}, "split.count is 3, the file's name says otherwise"),
        ({"split.count": "three"}, "split.count is no number"),
    ],
)
def test_metadata_that_cannot_be_a_model(change, message, tmp_path):
    path = rewritten(tmp_path, dict(change))
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_missing_metadata_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks llama\.context_length"):
        open_checkpoint(rewritten(tmp_path, {}, remove={"llama.context_length"}))


def split(model, tokenizer, folder, parts=3):
    """A model in parts, by the gguf package."""
    gguf.write(folder / "whole.gguf", model.config, tensors_of(model), tokenizer, "F32")
    whole = oracle.GGUFReader(folder / "whole.gguf")
    paths = []
    for i in range(parts):
        paths.append(folder / f"m-{i + 1:05d}-of-{parts:05d}.gguf")
        writer = oracle.GGUFWriter(paths[-1], "llama")
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


def test_split_files_open_by_any_part(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    paths = split(model, tiny_tokenizer, tmp_path)
    whole = open_checkpoint(tmp_path / "whole.gguf")
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


def test_a_file_that_shrinks_after_it_was_opened(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    path = tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F32")
    opened = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.tensors["lm_head.weight"].read()
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.load_tokenizer()
