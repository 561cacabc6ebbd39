"""Prepared tokens, memory-mapped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from mlxlm.data.manifest import DTYPES, SPLITS, Manifest, Shard, SplitInfo
from mlxlm.utils.errors import DataError, os_errors_as

_CHUNK = 1 << 20  # tokens or document starts that are read at a time: 8 MB


class DatasetPart(NamedTuple):
    """A part of a dataset and the share of the training tokens to draw from it."""

    name: str
    weight: float
    data: TokenDataset


class TokenDataset:
    """One split of a prepared folder, or a part of it, as one long sequence of tokens.

    `len` is the number of tokens. Tokens, document starts and loss masks are memory-mapped.

    Attributes:
        manifest: Of the whole folder.
        split: "train" or "validation".
        name: For error messages.
        documents: Number of documents in this split.
        bytes: UTF-8 size of the text of this split.
        vocab_size: Of the tokenizer.
    """

    def __init__(self, manifest: Manifest, split: str, folder: Path, info: SplitInfo, part: str | None = None):
        self.manifest = manifest
        self.split = split
        self.name = f"the {split} data" + (f" of {part}" if part is not None else "")
        self.documents, self.bytes = info.documents, info.bytes
        self.vocab_size = manifest.vocab_size
        self._folder = folder
        self._shards = [s for s in (_MappedShard(folder, shard, manifest.dtype) for shard in info.shards) if len(s)]
        self._ends = list(accumulate(map(len, self._shards)))

    @classmethod
    def open(cls, folder: str | Path, split: str) -> Self:
        """Map the shards of `split` ("train" or "validation").

        Raises:
            DataError: The folder is not a complete prepared dataset; the message names the file and the field.
        """
        if split not in SPLITS:
            raise DataError(f"no split '{split}'", " or ".join(SPLITS))
        manifest = Manifest.read(Path(folder))
        return cls(manifest, split, Path(folder), getattr(manifest, split))

    @cached_property
    def parts(self) -> list[DatasetPart]:
        """The parts of the training text with their weights; a single part of weight 1 if there are no weights."""
        if self.split != "train" or len(self.manifest.parts) == 1:
            return [DatasetPart(self.split, 1.0, self)]
        return [
            DatasetPart(p.name, p.weight, type(self)(self.manifest, self.split, self._folder, p.train, p.name))
            for p in self.manifest.parts
        ]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), uint16 or uint32: a view of the file within one shard, else a copy.

        Raises:
            DataError: A token is not in the vocabulary.
        """
        parts = []
        for shard, first, last in self._ranges(start, stop):
            part = shard.tokens[first:last]
            if part.max() >= self.vocab_size:  # MLX would read past the end of the embedding
                raise DataError(f"{self.name} has a token {part.max()}, not below {self.vocab_size}")
            parts.append(part)
        return _concatenate(parts, np.dtype(self.manifest.dtype))

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """uint8: 1 for each of the tokens [start, stop) that is a training target; 0, in a conversation, for others."""
        masks = [shard.loss_mask(first, last) for shard, first, last in self._ranges(start, stop)]
        return _concatenate(masks, np.dtype(np.uint8))

    def num_targets(self) -> int:
        """Number of tokens that are training targets."""
        spans = [(start, min(start + _CHUNK, len(self))) for start in range(0, len(self), _CHUNK)]
        return sum(int(np.count_nonzero(self.loss_mask(*span))) for span in spans)

    def segment_ids(self, start: int, stop: int) -> np.ndarray:
        """int32: the number of the document of each of the tokens [start, stop), from 0 for the first."""
        is_start = np.zeros(stop - start, np.int32)
        before = 0
        for shard, first, last in self._ranges(start, stop):
            starts = shard.starts
            low, high = np.searchsorted(starts, (first, last))
            is_start[starts[low:high] - first + before] = 1
            before += last - first
        is_start[:1] = 0
        return np.cumsum(is_start, dtype=np.int32)

    @cached_property
    def starts(self) -> DocumentStarts:
        """Where documents start."""
        return DocumentStarts([shard.starts for shard in self._shards], self._ends)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[_MappedShard, int, int]]:
        """Each shard with some of the tokens [start, stop), and their range in it."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not within {len(self)} tokens")
        number = bisect_right(self._ends, start)
        while start < stop:
            shard, end = self._shards[number], min(stop, self._ends[number])
            offset = self._ends[number] - len(shard)
            yield shard, start - offset, end - offset
            start = end
            number += 1


class DocumentStarts:
    """Where the documents of a dataset start, read from the files on demand. `len` is the number of documents."""

    def __init__(self, starts: list[np.ndarray], ends: list[int]):
        self._starts, self._ends = starts, ends
        self._counts = np.cumsum([0, *map(len, starts)])

    def __len__(self) -> int:
        return int(self._counts[-1])

    def bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token and end (exclusive) of the documents with these numbers, int64."""
        return self._at(documents), self._at(documents + 1)

    def _at(self, documents: np.ndarray) -> np.ndarray:
        starts = np.full(len(documents), self._ends[-1] if self._ends else 0, np.int64)  # for the one after the last
        shards = np.searchsorted(self._counts, documents, side="right") - 1
        for shard in np.unique(shards[shards < len(self._starts)]):
            in_shard = shards == shard
            offset = self._ends[shard - 1] if shard else 0
            starts[in_shard] = self._starts[shard][documents[in_shard] - self._counts[shard]] + offset
        return starts


class _MappedShard:
    """The files of one shard. `len` is the number of tokens."""

    def __init__(self, folder: Path, shard: Shard, dtype: str):
        self._folder, self._shard = folder, shard
        self.tokens = self._map(shard.file, np.dtype(dtype).newbyteorder("<"), DTYPES[dtype])

    def __len__(self) -> int:
        return self._shard.tokens

    @cached_property
    def starts(self) -> np.ndarray:
        """Where documents start, int64, increasing. Raises DataError if the file has anything else."""
        path = self._folder / self._shard.index_file
        with os_errors_as(DataError, "read", path):
            try:
                starts = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise DataError(f"{path} is not an array: {error}", "preparing the data again") from error
        if starts.dtype != np.int64 or starts.ndim != 1 or not self._are_increasing(starts):
            problem = f"must have increasing document starts within {len(self)} tokens"
            raise DataError(f"{path} {problem}, it has {starts.dtype} {starts.shape}", "preparing the data again")
        return starts

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, np.uint8) if self._mask is None else self._mask[start:stop]

    @cached_property
    def _mask(self) -> np.ndarray | None:
        return None if self._shard.mask_sha256 is None else self._map(self._shard.mask_file, np.dtype(np.uint8), 1)

    def _map(self, name: str, dtype: np.dtype, itemsize: int) -> np.ndarray:
        path = self._folder / name
        with os_errors_as(DataError, "read", path):
            size = path.stat().st_size
            if size != len(self) * itemsize:
                problem = f"{path} has {size} bytes, but the manifest's field 'tokens' says {len(self)} tokens"
                raise DataError(problem, "preparing the data again")
            return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)

    def _are_increasing(self, starts: np.ndarray) -> bool:
        last = -1
        for first in range(0, len(starts), _CHUNK):
            part = starts[first : first + _CHUNK]
            if part[0] <= last or (np.diff(part) <= 0).any():
                return False
            last = int(part[-1])
        return last < len(self)


def _concatenate(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
