"""safetensors files from their parts, valid or not."""

import json
import struct


def header_file(path, header: dict | bytes, data: bytes = b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(first, last, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
