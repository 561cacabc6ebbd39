"""The manifest of a prepared dataset: what is in it and how it was made. If it is there, the dataset is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import parse_json_object

VERSION = 3
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "validation")
DTYPES = {"uint16": 2, "uint32": 4}  # bytes per token, little-endian
MIN_WEIGHT = 1e-3  # rows are drawn in blocks of 1000, see `mlxlm.data.batches`
WEIGHTS_HINT = "wiki.txt=0.7 books=0.3: all sources with a weight, or none"
_MAX_BYTES = 1 << 28  # of a manifest; a shard of 64M tokens has a line of 120 bytes


def is_prepared(path: str | Path) -> bool:
    """Whether `path` is a prepared dataset."""
    return Path(path, MANIFEST_FILE).is_file()


def prepared_source(sources: Sequence[str | Path]) -> Path | None:
    """Return the folder of prepared data that `sources` consists of; None for text.

    Raises:
        DataError: Prepared data is mixed with other sources.
    """
    folders = [Path(s) for s in sources if is_prepared(s)]
    if folders and len(sources) > 1:
        problem = f"{folders[0]} is prepared data and can't be used with other sources"
        raise DataError(problem, "it alone, or text files")
    return folders[0] if folders else None


@dataclass
class Shard:
    """One file of tokens and the files that belong to it.

    Attributes:
        file: Name of the file of tokens.
        tokens: Number of tokens.
        sha256: Digest of `file`.
        index_sha256: Digest of `index_file`: int64 offsets, increasing, where documents start. The first can be above
            0, since a document can continue from the previous shard.
        mask_sha256: Digest of `mask_file`, one uint8 per token: 1 if the token is a training target, 0 if not (in a
            conversation, everything but the assistant's messages). None: there is no mask, all tokens are targets.
    """

    file: str
    tokens: int
    sha256: str
    index_sha256: str
    mask_sha256: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file of the shard."""
        mask = {} if self.mask_sha256 is None else {self.mask_file: self.mask_sha256}
        return {self.file: self.sha256, self.index_file: self.index_sha256, **mask}

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
class SkipReason:
    """Why lines and rows were left out.

    Attributes:
        example: The first error of its kind.
        count: Number of lines and rows.
    """

    example: str
    count: int = 0


@dataclass
class FormatCount:
    """Number of documents that were read in one of the formats of `mlxlm.data.record_formats`."""

    name: str
    documents: int


@dataclass
class Manifest:
    """Contents of a prepared dataset.

    Attributes:
        fingerprint: Of the tokenizer.
        vocab_size: Of the tokenizer.
        dtype: Of the tokens: "uint16" or "uint32".
        validation_split: How validation was chosen: "documents" (whole documents), "blocks" (spread over the text, if
            there are few documents), "files" (named by the user), or "mixed" (sources with weights are split
            separately, and not all in the same way).
        num_conversations: Documents that are conversations.
        sources: File names of the sources.
        parts: The training text, one part or more. `validation` is drawn from all sources, whatever their weights.
        validation: The validation split.
        dedup: Duplicates left out; None without deduplication.
        skipped: Lines and rows left out as bad input, see `BadInput`.
        skip_reasons: Why they were left out; None if an earlier version wrote this.
        formats: Formats of the documents, the most frequent first; None if an earlier version wrote this.
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
    skip_reasons: list[SkipReason] | None = None
    formats: list[FormatCount] | None = None
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
        hint = "preparing the data again"
        fields = parse_json_object(read_bytes(path, _MAX_BYTES, DataError), str(path), DataError, hint)
        try:
            if (version := _value(fields.get("version"), int, "version")) != VERSION:
                raise ValueError(f"field 'version' is {version}, not {VERSION}")
            manifest = _value(fields, Manifest, "")
            manifest._check()
        except (ValueError, DataError) as error:
            raise DataError(f"{path}: {getattr(error, 'message', error)}", hint) from None
        return manifest

    def _check(self) -> None:
        """Raise ValueError for values that can't be right, and divide the weights by their sum."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype '{self.dtype}' is not one of {', '.join(DTYPES)}")
        if not self.parts:
            raise ValueError("field 'parts' is empty")
        for part, weight in zip(self.parts, normalize_weights([part.weight for part in self.parts]), strict=True):
            part.weight = weight
        splits = {f"parts[{i}].train": part.train for i, part in enumerate(self.parts)}
        for name, split in (*splits.items(), ("validation", self.validation)):
            if sum(shard.tokens for shard in split.shards) != split.tokens:
                raise ValueError(f"field '{name}.tokens' is not the sum of the shards' tokens")
            for i, shard in enumerate(split.shards):
                if not shard.file or Path(shard.file).name != shard.file:
                    raise ValueError(f"field '{name}.shards[{i}].file' is not a plain file name")


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Divide the weights by their sum.

    Raises:
        DataError: A weight is not a positive number, or below a thousandth of the sum.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise DataError(f"a weight is {weight}, it must be a positive number", WEIGHTS_HINT)
    shares = [weight / math.fsum(weights) for weight in weights]
    if shares and min(shares) < MIN_WEIGHT:
        problem = f"a weight is {min(weights)}, {min(shares):.2g} of their sum: the smallest share is {MIN_WEIGHT}"
        raise DataError(problem, WEIGHTS_HINT)
    return shares


def _value(value: Any, kind: Any, name: str) -> Any:
    """Convert a JSON value to `kind`: a dataclass, a list, an optional value, a string or a number that isn't negative.

    Raises:
        ValueError: It has another type; the message has the field's `name`.
    """
    if isinstance(kind, UnionType):  # a type or None
        return None if value is None else _value(value, get_args(kind)[0], name)
    expected = dict if is_dataclass(kind) else (int, float) if kind is float else get_origin(kind) or kind
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"field '{name}' is missing or not {getattr(expected, '__name__', 'a number')}")
    if isinstance(value, dict):
        prefix = name and f"{name}."
        return kind(**{key: _value(value.get(key), hint, prefix + key) for key, hint in get_type_hints(kind).items()})
    if isinstance(value, list):
        return [_value(item, get_args(kind)[0], f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError(f"field '{name}' is negative")
    return value
