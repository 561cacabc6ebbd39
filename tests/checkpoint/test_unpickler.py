"""The unpickler reads tensors and never runs code."""

import collections
import pickle
import time

import pytest

from mlxlm.checkpoint import pytorch
from mlxlm.checkpoint.pytorch import PickleError, Storage, TensorView, read_pickle
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.pickles import archive, state


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "refers to os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "refers to builtins.eval"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "LONG4|operation"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "operation"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "cut off"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "no dictionary of tensors"),
        (b"\x80\x02" + b"(" * 20_000 + b".", "no dictionary of tensors|malformed"),
        (b"\x80\x02)" + b"2\x86" * 100 + b".", "operation"),
        (b"\x80\x02)q\x00" + b"h\x00\x86q\x00" * 200 + b".", "no dictionary of tensors"),
        (b"\x80\x04)q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"h\x00\x93.", "malformed"),
        (b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"Ns.", "malformed"),
        (b"", "cut off"),
        (b"t.", "cut off|malformed"),
        (b"\x80\x02]q\x00h\x00a.", "no dictionary of tensors"),
        (b"\x80\x02}J\xff\xff\xff\xffNs.", "malformed"),
        (b"\x80\x02}\x8a\x04\x00\x00\x00\x80Ns.", "malformed"),
    ],
)
def test_other_pickles_are_errors(tmp_path, content, expected):
    path = archive(tmp_path / "x.bin", content, {})
    with pytest.raises(CheckpointError, match=f"x.bin: unsupported pickle.*({expected})"):
        pytorch.file_tensors(path)


def test_the_number_of_operations_is_limited(monkeypatch):
    monkeypatch.setattr(pytorch, "_MAX_READS", 1000)
    with pytest.raises(PickleError, match="more than 1000 reads"):
        read_pickle(b"\x80\x02" + b"]" * 1000 + b".")


def test_plain_values():
    value = {"a": [1, 2.5, None, True, -300, 2**40, "text", (1,), (1, 2, 3, 4), {"b": ()}]}
    value["c"] = collections.OrderedDict()
    for protocol in (2, 3, 4, 5):
        assert read_pickle(pickle.dumps(value, protocol)) == value
    with pytest.raises(PickleError, match="refers to fractions.Fraction"):
        import fractions

        read_pickle(pickle.dumps(fractions.Fraction(1, 2)))
    assert isinstance(next(iter(read_pickle(state({"a": ("FloatStorage", "0", 1, 0, (), ())})).values())), TensorView)
    assert Storage("FloatStorage", "0", 1) == Storage("FloatStorage", "0", 1)


def test_hash_collisions_are_refused():
    """In a dictionary, 40,000 of them would take 17 s, and the limits allow six times as many."""
    numbers = ((2**61 - 1) * i for i in range(1, 40_000))
    keys = b"".join(b"\x8a\x0a" + number.to_bytes(10, "little", signed=True) + b"N" for number in numbers)
    started = time.process_time()
    with pytest.raises(PickleError, match="malformed"):
        read_pickle(b"\x80\x02}(" + keys + b"u.")
    assert time.process_time() - started < 2
