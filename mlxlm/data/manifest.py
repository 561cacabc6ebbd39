"""The manifest of a prepared dataset: what is in it and how it was made. If it is there, the dataset is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import parse_json_object

VERSION = 3
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": 2, "uint32": 4}  # bytes per token, little-endian
MIN_WEIGHT = 1e-3  # rows are drawn in blocks of 1000, see `mlxlm.data.mixture`
_MAX_BYTES = 1 << 28  # of a manifest; a shard of 64M tokens has a line of 120 bytes


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a prepared dataset."""
    return Path(path, MANIFEST_FILE).is_file()


@dataclass
class Shard:
    """One file of tokens and the files beside it.

    Attributes:
        file: Name of the file of tokens.
        tokens: Number of tokens.
        sha256: Digest of `file`.
        mask_sha256: Digest of `mask_file`, one uint8 per token: 1 if the token is a training target, 0 if not (in a
            conversation, everything but the assistant's messages). None: there is no mask, all tokens are targets.
        index_sha256: Digest of `index_file`: int64 offsets, increasing, where documents start. The first can be above
            0, since a document can continue from the previous shard.
    """

    file: str
    tokens: int
    sha256: str
    mask_sha256: str | None = None
    index_sha256: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file of the shard."""
        digests = {self.file: self.sha256, self.mask_file: self.mask_sha256, self.index_file: self.index_sha256}
        return {file: digest for file, digest in digests.items() if digest is not None}

    @property
    def index_file(self) -> str:
        """Name of the file of document offsets."""
        return self.file.removesuffix(".bin") + ".idx.npy"

    @property
    def mask_file(self) -> str:
        """Name of the file of the loss mask."""
        return self.file.removesuffix(".bin") + ".mask.bin"


@dataclass
class SplitInfo:
    """Size of a split. `bytes` is the UTF-8 size of the text; special tokens count in `tokens` only."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class TrainPart:
    """Training text that is drawn with one weight: one source, or all sources together.

    `weight` is the share of the training tokens to draw from it; the weights of all parts sum to 1.
    """

    name: str
    weight: float
    train: SplitInfo


@dataclass
class DedupStats:
    """Documents that were left out as duplicates.

    Attributes:
        threshold: Jaccard similarity from which on a document counts as a near-duplicate.
        documents: Documents read.
        exact: Exact duplicates left out.
        near: Near-duplicates left out.
        bytes: UTF-8 bytes left out.
    """

    threshold: float
    documents: int = 0
    exact: int = 0
    near: int = 0
    bytes: int = 0

    @property
    def fraction(self) -> float:
        """Share of the documents that was left out."""
        return (self.exact + self.near) / self.documents if self.documents else 0.0


@dataclass
class Manifest:
    """Contents of a prepared dataset.

    Attributes:
        fingerprint: Of the tokenizer.
        vocab_size: Of the tokenizer.
        dtype: Of the tokens: "uint16" or "uint32".
        validation_split: How validation was chosen: "documents" (whole documents), "tail" (the end of the text, if
            there are few documents), "files" (named by the user), or "mixed" (sources with weights are split
            separately, and not all in the same way).
        num_conversations: Documents that are conversations.
        sources: File names of the sources.
        parts: The training text, one part or more. `validation` is drawn from all sources, whatever their weights.
        validation: The validation split.
        dedup: Duplicates left out; None without deduplication.
        skipped: Lines and rows left out as bad input, see `BadInput`.
        version: Of the format.
    """

    fingerprint: str
    vocab_size: int
    dtype: str
    validation_split: str
    num_conversations: int
    sources: list[str]
    parts: list[TrainPart]
    validation: SplitInfo
    dedup: DedupStats | None = None
    skipped: int = 0
    version: int = VERSION

    @property
    def train(self) -> SplitInfo:
        """All parts together, their shards in order."""
        splits = [part.train for part in self.parts]
        tokens, documents, size = (sum(getattr(s, name) for s in splits) for name in ("tokens", "documents", "bytes"))
        return SplitInfo(tokens, documents, size, [shard for split in splits for shard in split.shards])

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON. "train" and "dedup.fraction" are derived: they are for readers of the file."""
        fields = asdict(self)
        fields["train"] = {name: getattr(self.train, name) for name in ("tokens", "documents", "bytes")}
        if self.dedup is not None:
            fields["dedup"]["fraction"] = self.dedup.fraction
        return fields

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest in `folder`.

        Raises:
            DataError: There is none, or a field is wrong; the message names the file and the field.
        """
        path = folder / MANIFEST_FILE
        if not is_prepared(folder):
            raise DataError(f"{folder} is not a prepared dataset: it has no {MANIFEST_FILE}", "mlxlm prepare")
        content = read_bytes(path, _MAX_BYTES, DataError)
        fields = parse_json_object(content, str(path), DataError, "preparing the data again")
        reader = _FieldReader(path, fields)
        if reader.get("version", int) != VERSION:
            raise DataError(f"{path}: version {fields['version']} is not {VERSION}", "preparing the data again")
        if reader.get("dtype", str) not in DTYPES:
            raise DataError(f"{path}: dtype '{fields['dtype']}' is not one of {', '.join(DTYPES)}")
        return cls(
            fingerprint=reader.get("fingerprint", str),
            vocab_size=reader.count("vocab_size"),
            dtype=fields["dtype"],
            validation_split=reader.get("validation_split", str),
            num_conversations=reader.count("num_conversations"),
            sources=reader.get("sources", list),
            parts=_read_parts(reader),
            validation=_read_split(reader.object("validation")),
            dedup=_read_dedup(reader),
            skipped=reader.count("skipped"),
        )


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Divide the weights by their sum.

    Raises:
        ValueError: A weight is not a positive number, or below a thousandth of the sum.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight is {weight}, it must be a positive number")
    shares = [weight / math.fsum(weights) for weight in weights]
    if shares and min(shares) < MIN_WEIGHT:
        share = f"{min(shares):.2g}"
        raise ValueError(f"a weight is {min(weights)}, {share} of their sum: the smallest share is {MIN_WEIGHT}")
    return shares


class _FieldReader:
    """Typed access to an untrusted JSON object; errors name the file and the field."""

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

    def optional(self, name: str, kind: type) -> Any:
        return None if self._fields.get(name) is None else self.get(name, kind)

    def count(self, name: str) -> int:
        if (value := self.get(name, int)) < 0:
            raise self.error(name, "is negative")
        return value

    def number(self, name: str) -> float:
        value = self._fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.error(name, "is missing or not a positive number")
        return float(value)

    def object(self, name: str) -> _FieldReader:
        return _FieldReader(self._path, self._fields.get(name), f"{self._prefix}{name}.")

    def objects(self, name: str) -> list[_FieldReader]:
        rows = enumerate(self.get(name, list))
        return [_FieldReader(self._path, row, f"{self._prefix}{name}[{i}].") for i, row in rows]

    def error(self, name: str, problem: str) -> DataError:
        return DataError(f"{self._path}: field '{self._prefix}{name}' {problem}", "preparing the data again")


def _read_parts(reader: _FieldReader) -> list[TrainPart]:
    rows = reader.objects("parts")
    if not rows:
        raise reader.error("parts", "is empty")
    try:
        weights = normalize_weights([row.number("weight") for row in rows])
    except ValueError as error:
        raise reader.error("parts", f"has bad weights: {error}") from None
    return [
        TrainPart(row.get("name", str), weight, _read_split(row.object("train")))
        for row, weight in zip(rows, weights, strict=True)
    ]


def _read_dedup(reader: _FieldReader) -> DedupStats | None:
    if reader.optional("dedup", dict) is None:
        return None
    stats = reader.object("dedup")
    return DedupStats(stats.number("threshold"), *map(stats.count, ("documents", "exact", "near", "bytes")))


def _read_split(reader: _FieldReader) -> SplitInfo:
    shards = [_read_shard(row) for row in reader.objects("shards")]
    split = SplitInfo(reader.count("tokens"), reader.count("documents"), reader.count("bytes"), shards)
    if sum(shard.tokens for shard in shards) != split.tokens:
        raise reader.error("tokens", "is not the sum of the shards' tokens")
    return split


def _read_shard(reader: _FieldReader) -> Shard:
    shard = Shard(
        file=reader.get("file", str),
        tokens=reader.count("tokens"),
        sha256=reader.get("sha256", str),
        mask_sha256=reader.optional("mask_sha256", str),
        index_sha256=reader.get("index_sha256", str),
    )
    if not shard.file or Path(shard.file).name != shard.file:
        raise reader.error("file", "is not a plain file name")
    return shard
