"""Headers, against the gguf package."""

from __future__ import annotations

import time

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.checkpoint.gguf.header import read_header
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.raw_files import Raw, array, finish

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
    finish(writer)
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
