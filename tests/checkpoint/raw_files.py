"""safetensors, PyTorch and GGUF files from their parts, valid or not."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile


def header_file(path, header: dict | bytes, data: bytes = b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(first, last, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


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
        parts_and_counts = ((self.tensors, self.tensor_count), (self.keys, self.key_count))
        counts = [len(parts) if count is None else count for parts, count in parts_and_counts]
        header = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join(self.keys + self.tensors)
        path.write_bytes(header + bytes(-len(header) % 32) + data)
        return path


def finish(writer) -> None:
    """Write the file of a GGUFWriter of the gguf package."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer, config) -> None:
    """Add the sizes of a ModelConfig to a GGUFWriter."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def small_llama(tmp_path, change: dict, remove=()):
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
    layer |= dict.fromkeys(("attn_output", "ffn_gate", "ffn_up", "ffn_down"), (4, 4))
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    for i, (name, shape) in enumerate(shapes.items()):
        raw.tensor(name, shape, offset=128 * i)
    return raw.write(path, bytes(128 * len(shapes)))
