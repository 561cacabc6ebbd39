"""Broken at random: whatever a file's bytes, opening it ends in a checkpoint or in one MlxlmError.

MLXLM_FUZZ_CASES sets the cases per format. A case is its format and number: it is the same on every machine.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoint.hostile import KINDS, Victim, complaint, make

CASES = int(os.environ.get("MLXLM_FUZZ_CASES", "120"))
NUMBERS = [0, 1, 2, 3, 7, 31, 127, 128, 255, 256, 300, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1,
           2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
VALUES = [
    *NUMBERS, -1, -2, -(2**31), 2**64, 10**40, 1.5, -0.5, 1e308, float("nan"), float("inf"), None, True, False, "",
    "a", "../x", "/etc/passwd", "\0", "\n", "\ud800", "F64", "a" * 5000, [], {}, [1], [[]], [0, 0], [2**31, 2**31],
    [2**40] * 3, {"a": 1}, [None] * 3,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_a_checkpoint_or_one_error(tmp_path, kind):
    whole = make(kind, tmp_path / "whole")
    broken = whole.copy(tmp_path / "broken")
    originals = {target: target.read_bytes() for target in broken.targets}
    victim = Victim(whole.source)
    complaints = {}
    try:
        for case in range(CASES):
            rng = random.Random(f"{kind} {case}")
            target = rng.choice(broken.targets)
            target.write_bytes(mutated(originals[target], target.name, rng))
            found = complaint(victim.open(broken.source), "broken")
            target.write_bytes(originals[target])
            if found:
                complaints[case] = f"{target.name}: {found}"
    finally:
        victim.close()
    assert not complaints, "\n".join(f"{kind} {case}: {found}" for case, found in complaints.items())


def mutated(data: bytes, name: str, rng: random.Random) -> bytes:
    """`data` broken in one to three places, more often in its header, and by its own rules where it has some."""
    ways = [in_bytes]
    if name.endswith(".json"):
        ways = [in_bytes, in_json, in_json, in_json]
    elif name.endswith(".safetensors"):
        ways = [in_bytes, in_header, in_header]
    elif data[:2] == b"PK":
        ways = [in_bytes, in_members, in_members, in_members]
    return rng.choice(ways)(data, rng)


def in_bytes(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = max(1, len(result))
        # A third anywhere, the others near the begin: the first bytes, and all that could be a header.
        at = rng.randrange(rng.choice((size, min(size, 6000), min(size, 300))))
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 200)))
        way = rng.randrange(8)
        if way == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            result[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
        elif way in (2, 3):
            form = rng.choice("BHIQ")
            number = rng.choice(NUMBERS) & (256 ** struct.calcsize("<" + form) - 1)
            result[at : at + struct.calcsize("<" + form)] = struct.pack("<" + form, number)
        elif way == 4:
            del result[rng.choice((at, rng.randrange(size))) :]
        elif way == 5:
            result[at:at] = rng.choice((bytes(length), rng.randbytes(length), result[at : at + length]))
        elif way == 6:
            del result[at : at + length]
        else:
            other = rng.randrange(size)
            one, two = result[at : at + length], result[other : other + length]
            result[other : other + length] = one
            result[at : at + length] = two
    return bytes(result)


def in_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        change(value, rng)
    # Lone surrogates come out as escapes, other text as itself.
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def change(value: Any, rng: random.Random) -> None:
    """Change one place in a JSON value: a value replaced, moved, removed, or a name changed."""
    places = list(_places(value))
    if not places:
        return
    shallow = [place for place in places if place[2] < 3]  # a vocabulary has most places, and says the least
    holder, key, _ = rng.choice(shallow if shallow and rng.random() < 0.7 else places)
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "../x", "a" * 300, "\n", str(key) + "x"))] = holder.pop(key)
    elif way == 2:
        other, name, _ = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif way == 3 and isinstance(holder[key], int | float):
        number = holder[key]
        holder[key] = rng.choice((number + 1, number - 1, -number, number * 2, number * 2**32, float(number)))
    else:
        holder[key] = rng.choice(VALUES)


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any, int]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key, depth
        yield from _places(value[key], depth + 1)


def in_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors header changed, its length put right."""
    (length,) = struct.unpack_from("<Q", data)
    header = in_json(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def in_members(data: bytes, rng: random.Random) -> bytes:
    """The members of a zip archive changed, its checksums put right."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(written, "w") as target:
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
                content = in_bytes(content, rng)
            compression = rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
            target.writestr(zipfile.ZipInfo(name), content, compression)
    return written.getvalue()
