"""The manifest of a prepared dataset: what is in it and how it was made. Its presence means "complete"."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import parse_json_object, read_bytes
from mlxlm.utils.errors import DataError

VERSION = 2
_LARGEST = 1 << 28  # bytes of a manifest; a shard of 64M tokens has a line of 120
FILE = "manifest.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": 2, "uint32": 4}  # bytes per token, little-endian


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a prepared dataset: the manifest is there, so all of it is."""
    return Path(path, FILE).is_file()


@dataclass
class Shard:
    """One file of tokens, with its sha256.

    index: the file beside it of int64 offsets, rising, where documents start in it; the first can be above 0, since a
        document may go on from the shard before.
    mask: the sha256 of `mask_file`, one uint8 a token: 1 for a token to be learned as a target, 0 for one that is only
        read (in a conversation, all but the assistant's words). None: there is no such file, all are to be learned.
    index_sha256: of the file `index`; None in manifests that were written before it was recorded.
    """

    file: str
    tokens: int
    sha256: str
    mask: str | None = None
    index_sha256: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each file of the shard that has one."""
        known = {self.file: self.sha256, self.mask_file: self.mask, self.index: self.index_sha256}
        return {file: digest for file, digest in known.items() if digest is not None}

    @property
    def index(self) -> str:
        return self.file.removesuffix(".bin") + ".idx.npy"

    @property
    def mask_file(self) -> str:
        return self.file.removesuffix(".bin") + ".mask.bin"


@dataclass
class SplitInfo:
    """bytes: UTF-8 bytes of the text; special tokens are counted in `tokens` only."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class WeightedPart:
    """Training text that is drawn from by one weight: a source with its own, or all sources together.

    weight: the share of the training tokens that are drawn from it; those of all parts sum to 1.
    """

    name: str
    weight: float
    train: SplitInfo


@dataclass
class DedupStats:
    """What was left out because it had been there before.

    threshold: the least Jaccard similarity of a near-duplicate.
    documents: how many documents were read; exact, near: how many of them were left out, repeated to the byte and not.
    bytes: UTF-8 bytes of those.
    """

    threshold: float
    documents: int = 0
    exact: int = 0
    near: int = 0
    bytes: int = 0

    @property
    def share(self) -> float:
        """Of the documents, those left out."""
        return (self.exact + self.near) / self.documents if self.documents else 0.0


@dataclass
class Manifest:
    """split: how validation was chosen: "document" (whole documents), "tail" (the end of the text; for few
    documents), "given" (files named by the user), or "mixed": sources with weights are split each for itself, and these
    were split differently.
    parts: the training text, one part or more. Only `train` follows the weights; `validation` is of all sources.
    skipped: lines and rows that were left out because they can't be used, see `BadInput`."""

    fingerprint: str
    vocab_size: int
    dtype: str
    split: str
    num_conversations: int
    sources: list[str]
    parts: list[WeightedPart]
    validation: SplitInfo
    duplicates: DedupStats | None = None
    skipped: int = 0
    version: int = VERSION

    @property
    def train(self) -> SplitInfo:
        """All parts together, their shards in order."""
        splits = [part.train for part in self.parts]
        tokens, documents, size = (sum(getattr(s, name) for s in splits) for name in ("tokens", "documents", "bytes"))
        return SplitInfo(tokens, documents, size, [shard for split in splits for shard in split.shards])

    def to_dict(self) -> dict[str, Any]:
        """The fields; "train" and the duplicates' "share" are for readers of the file: `read` reckons them itself."""
        fields = asdict(self)
        fields["train"] = {name: getattr(self.train, name) for name in ("tokens", "documents", "bytes")}
        if self.duplicates is not None:
            fields["duplicates"]["share"] = self.duplicates.share
        return fields

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DataError, naming the file and the field, if `folder` has no valid manifest."""
        path = folder / FILE
        if not is_prepared(folder):
            raise DataError(f"{folder} is not a prepared dataset: it has no {FILE}", "mlxlm prepare")
        content = read_bytes(path, _LARGEST, DataError)
        fields = parse_json_object(content, str(path), DataError, "preparing the data again")
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
            num_conversations=reader.count("num_conversations"),
            sources=reader.get("sources", list),
            parts=reader.parts(),
            validation=reader.inner("validation").split(),
            duplicates=reader.duplicates(),
            skipped=reader.count("skipped") if "skipped" in fields else 0,
        )


def normalize_weights(weights: list[float]) -> list[float]:
    """The weights divided by their sum. Raises ValueError where one of them is not a positive number, and for a share
    below a thousandth, which is what rows are drawn by (`mlxlm.data.mixture`)."""
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight is {weight}, it must be a positive number")
    found = [weight / math.fsum(weights) for weight in weights]
    if found and min(found) < 1e-3:
        raise ValueError(f"a weight is {min(weights)}, {min(found):.2g} of their sum: the least share is 0.001")
    return found


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

    def number(self, name: str) -> float:
        value = self._fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.error(name, "is missing or not a positive number")
        return float(value)

    def inner(self, name: str) -> _Fields:
        return _Fields(self._path, self._fields.get(name), f"{self._prefix}{name}.")

    def rows(self, name: str) -> list[_Fields]:
        rows = enumerate(self.get(name, list))
        return [_Fields(self._path, row, f"{self._prefix}{name}[{i}].") for i, row in rows]

    def parts(self) -> list[WeightedPart]:
        rows = self.rows("parts")
        try:
            weights = normalize_weights([row.number("weight") for row in rows])
        except ValueError as error:
            raise self.error("parts", f"can't be weighted: {error}") from None
        if not rows:
            raise self.error("parts", "is empty")
        return [
            WeightedPart(row.get("name", str), weight, row.inner("train").split())
            for row, weight in zip(rows, weights, strict=True)
        ]

    def duplicates(self) -> DedupStats | None:
        if self._fields.get("duplicates") is None:
            return None
        found = self.inner("duplicates")
        counts = (found.count(name) for name in ("documents", "exact", "near", "bytes"))
        return DedupStats(found.number("threshold"), *counts)

    def split(self) -> SplitInfo:
        shards = [row.shard() for row in self.rows("shards")]
        split = SplitInfo(self.count("tokens"), self.count("documents"), self.count("bytes"), shards)
        if sum(shard.tokens for shard in shards) != split.tokens:
            raise self.error("tokens", "is not the sum of the shards' tokens")
        return split

    def shard(self) -> Shard:
        mask, index = (None if self._fields.get(n) is None else self.get(n, str) for n in ("mask", "index_sha256"))
        shard = Shard(self.get("file", str), self.count("tokens"), self.get("sha256", str), mask, index)
        if not shard.file or Path(shard.file).name != shard.file:
            raise self.error("file", "is not a plain file name")
        return shard

    def error(self, name: str, problem: str) -> DataError:
        return DataError(f"{self._path}: field '{self._prefix}{name}' {problem}", "preparing the data again")
