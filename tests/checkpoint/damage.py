"""Ways to damage a valid checkpoint: at one place, or at random."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

from tests.checkpoint.samples import Sample

NUMBERS = [0, 1, 2, 3, 7, 31, 127, 128, 255, 256, 300, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1,
           2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
VALUES = [
    *NUMBERS, -1, -2, -(2**31), 2**64, 10**40, 1.5, -0.5, 1e308, float("nan"), float("inf"), None, True, False, "",
    "a", "../x", "/etc/passwd", "\0", "\n", "\ud800", "F64", "a" * 5000, [], {}, [1], [[]], [0, 0], [2**31, 2**31],
    [2**40] * 3, {"a": 1}, [None] * 3,
]  # fmt: skip


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


def gguf_tensor(name: str, form: str, value: int, skip: int):
    """A number of the tensor table set to `value`, `skip` bytes after a tensor's name."""

    def write(data: bytes) -> bytes:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + skip
        return data[:at] + struct.pack("<" + form, value) + data[at + struct.calcsize("<" + form) :]

    return in_target(write)


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


def mutated(data: bytes, name: str, rng: random.Random) -> bytes:
    """Damage `data` in one to three places, with a method for its format."""
    ways = [mutate_bytes]
    if name.endswith(".json"):
        ways = [mutate_bytes, mutate_json, mutate_json, mutate_json]
    elif name.endswith(".safetensors"):
        ways = [mutate_bytes, mutate_header, mutate_header]
    elif data[:2] == b"PK":
        ways = [mutate_bytes, mutate_members, mutate_members, mutate_members]
    return rng.choice(ways)(data, rng)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Overwrite, insert or remove bytes in one to three places, a third anywhere, the others near the start."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = max(1, len(result))
        at = rng.randrange(rng.choice((size, min(size, 6000), min(size, 300))))
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 200)))
        form = rng.choice("BHIQ")
        number = struct.pack("<" + form, rng.choice(NUMBERS) & (256 ** struct.calcsize("<" + form) - 1))
        end, new = rng.choice(
            ((at + len(number), number), (at, rng.randbytes(length)), (at + length, b""), (size, b""))
        )
        result[at:end] = new
    return bytes(result)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        change_json(value, rng)
    # Lone surrogates are written as escapes.
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def change_json(value: Any, rng: random.Random) -> None:
    """Change one place in a JSON value: replace or remove a value, or rename it."""
    places = list(walk_json(value))
    if not places:
        return
    shallow = [place for place in places if place[2] < 3]  # most places are in the vocabulary, which matters least
    container, key, _ = rng.choice(shallow if shallow and rng.random() < 0.7 else places)
    way = rng.randrange(4)
    if way == 0:
        del container[key]
    elif way == 1 and isinstance(container, dict):
        container[rng.choice(("", "../x", "a" * 300, "\n", str(key) + "x"))] = container.pop(key)
    else:
        container[key] = rng.choice(VALUES)


def walk_json(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any, int]]:
    """Yield the container, the key and the depth of every value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key, depth
        yield from walk_json(value[key], depth + 1)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Change a safetensors header and correct its length."""
    (length,) = struct.unpack_from("<Q", data)
    header = mutate_json(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def mutate_members(data: bytes, rng: random.Random) -> bytes:
    """Change the members of a ZIP archive with correct checksums."""
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(archive, "w") as target:
        names = source.namelist()
        pickles = [name for name in names if name.endswith(".pkl")]
        chosen = rng.choice(pickles if pickles and rng.random() < 0.8 else names)
        for name in names:
            content = source.read(name)
            if name == chosen:
                way = rng.randrange(8)
                if way == 0:
                    continue
                if way == 1:
                    name = rng.choice(("../x", "/x", "data.pkl", name + "x", name.upper()))
                content = mutate_bytes(content, rng)
            compression = rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
            target.writestr(zipfile.ZipInfo(name), content, compression)
    return archive.getvalue()
