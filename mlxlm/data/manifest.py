"""The manifest of a prepared dataset: what is in it and how it was made. Its presence means "complete"."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.errors import DataError, os_errors_as

VERSION = 1
FILE = "manifest.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": 2, "uint32": 4}  # bytes per token, little-endian


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a prepared dataset: the manifest is there, so all of it is."""
    return Path(path, FILE).is_file()


@dataclass
class Shard:
    """One file of tokens; beside it lies <stem>.idx.npy, the int64 offsets where documents start in it."""

    file: str
    tokens: int
    sha256: str

    @property
    def index(self) -> str:
        return self.file.removesuffix(".bin") + ".idx.npy"


@dataclass
class Split:
    """bytes: UTF-8 bytes of the text; special tokens are counted in `tokens` only."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Manifest:
    """split: how validation was chosen: "document" (whole documents), "tail" (the end of the text; for few
    documents) or "given" (files named by the user)."""

    fingerprint: str
    vocab_size: int
    dtype: str
    split: str
    chat_documents: int
    sources: list[str]
    train: Split
    validation: Split
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataError, naming the file and the field, if `folder` has no valid manifest."""
        path = folder / FILE
        if not is_prepared(folder):
            raise DataError(f"{folder} is not a prepared dataset: it has no {FILE}", "mlxlm prepare")
        with os_errors_as(DataError, "read", path):
            content = path.read_bytes()
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not valid JSON: {error}", "preparing the data again") from error
        reader = _Fields(path, fields)
        if reader.get("version", int) != VERSION:
            raise DataError(f"{path}: version {fields['version']} is not known", "preparing the data again")
        if reader.get("dtype", str) not in DTYPES:
            raise DataError(f"{path}: dtype '{fields['dtype']}' is not one of {', '.join(DTYPES)}")
        return cls(
            fingerprint=reader.get("fingerprint", str),
            vocab_size=reader.count("vocab_size"),
            dtype=fields["dtype"],
            split=reader.get("split", str),
            chat_documents=reader.count("chat_documents"),
            sources=reader.get("sources", list),
            **{split: reader.split(split) for split in SPLITS},
        )


class _Fields:
    """Typed access to a JSON object that was written by nobody knows whom."""

    def __init__(self, path: Path, fields: Any, prefix: str = ""):
        self._path = path
        self._prefix = prefix
        if not isinstance(fields, dict):
            raise DataError(f"{path}: {prefix.rstrip('.') or 'the content'} is not a JSON object")
        self._fields = fields

    def get(self, name: str, kind: type) -> Any:
        value = self._fields.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(name, f"is missing or not {kind.__name__}")
        return value

    def count(self, name: str) -> int:
        if (value := self.get(name, int)) < 0:
            raise self.error(name, "is negative")
        return value

    def split(self, name: str) -> Split:
        part = _Fields(self._path, self._fields.get(name), f"{self._prefix}{name}.")
        shards = [
            _Fields(self._path, shard, f"{part._prefix}shards[{i}].").shard()
            for i, shard in enumerate(part.get("shards", list))
        ]
        split = Split(part.count("tokens"), part.count("documents"), part.count("bytes"), shards)
        if sum(shard.tokens for shard in shards) != split.tokens:
            raise part.error("tokens", "is not the sum of the shards' tokens")
        return split

    def shard(self) -> Shard:
        shard = Shard(self.get("file", str), self.count("tokens"), self.get("sha256", str))
        if not shard.file or Path(shard.file).name != shard.file:
            raise self.error("file", "is not a plain file name")
        return shard

    def error(self, name: str, problem: str) -> DataError:
        return DataError(f"{self._path}: field '{self._prefix}{name}' {problem}", "preparing the data again")
