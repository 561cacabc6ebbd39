"""Headers: against the gguf package, and hostile ones."""

from __future__ import annotations

import struct
import time
import tracemalloc

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.checkpoint.gguf.header import read_header
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.raw_gguf import Raw, array, text

NUMBERS = {
    gguf_package.GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    gguf_package.GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    gguf_package.GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    gguf_package.GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    gguf_package.GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    gguf_package.GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    gguf_package.GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    gguf_package.GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    gguf_package.GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    gguf_package.GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    gguf_package.GGUFValueType.BOOL: st.booleans(),
    gguf_package.GGUFValueType.STRING: st.text(max_size=20),
}
SCALARS = st.one_of(*(values.map(lambda v, kind=kind: (kind, v)) for kind, values in NUMBERS.items()))
ARRAYS = st.one_of(
    *(st.lists(values, min_size=1, max_size=5).map(lambda v, kind=kind: (kind, v)) for kind, values in NUMBERS.items())
)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scalars=st.lists(SCALARS, max_size=6),
    arrays=st.lists(ARRAYS, max_size=4),
    shapes=st.lists(SHAPES, max_size=5),
    alignment=st.sampled_from([8, 32, 64, 4096]),
)
def test_headers_of_the_gguf_package(scalars, arrays, shapes, alignment, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf_package.GGUFWriter(path, "test")
    writer.add_custom_alignment(alignment)
    for i, (kind, value) in enumerate(scalars):
        writer.add_key_value(f"scalar.{i}", value, kind)
    for i, (kind, value) in enumerate(arrays):
        writer.add_key_value(f"array.{i}", value, gguf_package.GGUFValueType.ARRAY, sub_type=kind)
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
    "'a\\\\x1b.*is not a name": Raw().key("a\x1b[2J", 4, bytes(4)),
    "a.b occurs twice": Raw().key("a.b", 4, bytes(4)).key("a.b", 4, bytes(4)),
    "a.b has the unknown type 13": Raw().key("a.b", 13, bytes(4)),
    "a.b is 2, which is neither true": Raw().key("a.b", 7, b"\x02"),
    "a.b claims 9223372036854775808 bytes": Raw().key("a.b", 8, struct.pack("<Q", 2**63)),
    "a.b ends past the end": Raw().key("a.b", 8, struct.pack("<Q", 10_000)),
    "a.n ends past the end": Raw().key("a.n", 9, array(6, 2**62)),
    "a.s claims 4611686018427387904 elements": Raw().key("a.s", 9, array(8, 2**62)),
    "a.s ends past the end": Raw().key("a.s", 9, array(8, 2, struct.pack("<Q", 2**60))),
    "a.u is an array of the unknown type 77": Raw().key("a.u", 9, array(77, 1)),
    "a.d has more than 4 nested arrays": Raw().key("a.d", 9, NESTED),
    "general.alignment is 33": Raw().key("general.alignment", 4, struct.pack("<I", 33)),
    "general.alignment is 0": Raw().key("general.alignment", 4, bytes(4)),
    "general.alignment is not a number": Raw().key("general.alignment", 8, text("32")),
    "tensor x has 0 dimensions": Raw().tensor(shape=()),
    "tensor x has 5 dimensions": Raw().tensor(shape=(1,) * 5),
    r"tensor x is \[4, 0\]": Raw().tensor(shape=(0, 4)),
    r"tensor x is \[\d+, \d+\]": Raw().tensor(shape=(2**40, 2**40)),
    "tensor x is .*Q4_K are multiples of 256": Raw().tensor(shape=(255, 2), kind=12),
    "tensor x is of type 4,": Raw().tensor(kind=4),
    "tensor x is of type 28,": Raw().tensor(kind=28),
    "tensor x occurs twice": Raw().tensor().tensor(offset=64),
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


def test_largest_header_takes_less_than_a_second(tmp_path):
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
