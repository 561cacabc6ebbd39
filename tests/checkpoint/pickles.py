"""Pickles and archives like those of `torch.save`."""

import pickle
import struct
import zipfile


def _text(value: str) -> bytes:
    raw = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def _int(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def _tuple(values) -> bytes:
    return pickle.MARK + b"".join(map(_int, values)) + pickle.TUPLE


def state(entries) -> bytes:
    """The pickle that `torch.save` makes of `{name: (kind, key, numel, offset, shape, strides)}`."""
    result = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK
    for name, (kind, key, numel, offset, shape, strides) in entries.items():
        storage = pickle.MARK + _text("storage") + b"ctorch\n" + kind.encode() + b"\n" + _text(key) + _text("cpu")
        storage += _int(numel) + pickle.TUPLE + pickle.BINPERSID
        arguments = pickle.MARK + storage + _int(offset) + _tuple(shape) + _tuple(strides) + pickle.NEWFALSE
        arguments += b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE
        result += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + pickle.REDUCE
    return result + pickle.SETITEMS + pickle.STOP


def archive(path, content: bytes, records: dict[str, bytes], **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("archive/data.pkl", content)
        for key, raw in records.items():
            file.writestr(f"archive/data/{key}", raw)
    return path
