"""Prepared tokens, memory-mapped."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlxlm.data.manifest import DTYPES, SPLITS, Manifest, Shard
from mlxlm.data.manifest import SplitInfo as Counts
from mlxlm.utils.errors import DataError, os_errors_as

_CHECKED = 1 << 20  # document starts looked at together: 8 MB


class WeightedPart(NamedTuple):
    """Text that is drawn from by one weight."""

    name: str
    weight: float
    data: TokenDataset


class TokenDataset:
    """One split of a prepared folder, or a part of it, as one long sequence of tokens.

    `len` is the number of tokens. Nothing is in memory but what is asked for: tokens, document starts and masks are
    mapped files. Attributes:
        documents, bytes: of this split; bytes are UTF-8 bytes of the text.
        vocab_size, fingerprint: the tokenizer's.
        split, manifest: the split's name, and the manifest of the whole folder.
        name: what messages call it.
    """

    def __init__(self, manifest: Manifest, split: str, folder: Path, counts: Counts, part: str | None = None):
        self.manifest = manifest
        self.split = split
        self.name = f"the {split} data" + (f" of {part}" if part is not None else "")
        self.documents, self.bytes = counts.documents, counts.bytes
        self.vocab_size = manifest.vocab_size
        self.fingerprint = manifest.fingerprint
        self._folder = folder
        self._shards = [s for s in (_Shard(folder, shard, manifest.dtype) for shard in counts.shards) if len(s)]
        self._ends = list(accumulate(map(len, self._shards)))

    @classmethod
    def open(cls, folder: str | Path, split: str) -> TokenDataset:
        """Map the shards of `split` ("train" or "validation").

        Raises DataError, naming the file and the field, for a folder that is not a complete prepared dataset.
        """
        if split not in SPLITS:
            raise DataError(f"no split '{split}'", " or ".join(SPLITS))
        manifest = Manifest.read(Path(folder))
        return cls(manifest, split, Path(folder), getattr(manifest, split))

    @cached_property
    def parts(self) -> list[WeightedPart]:
        """What the training text consists of, with the weights; one part of weight 1 where no source has its own."""
        manifest = self.manifest
        if self.split != "train" or len(manifest.parts) == 1:
            return [WeightedPart(self.split, 1.0, self)]
        return [
            WeightedPart(
                part.name, part.weight, TokenDataset(manifest, self.split, self._folder, part.train, part.name)
            )
            for part in manifest.parts
        ]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), uint16 or uint32: a view of the file inside one shard, else a joined copy.

        Raises DataError for a token that the vocabulary doesn't have.
        """
        parts = []
        for shard, first, last in self._within(start, stop):
            part = shard.tokens[first:last]
            if part.max() >= self.vocab_size:  # MLX would read past the end of the embedding
                raise DataError(f"{self.name} has a token {part.max()}, not below {self.vocab_size}")
            parts.append(part)
        return _joined(parts, np.dtype(self.manifest.dtype))

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the tokens [start, stop) is to be learned as a target, uint8: 1, or 0 for what in a
        conversation is only read."""
        return _joined([s.loss_mask(first, last) for s, first, last in self._within(start, stop)], np.dtype(np.uint8))

    def targets(self) -> int:
        """How many of all tokens are to be learned."""
        spans = [(start, min(start + _CHECKED, len(self))) for start in range(0, len(self), _CHECKED)]
        return sum(int(np.count_nonzero(self.loss_mask(*span))) for span in spans)

    def segment_ids(self, start: int, stop: int) -> np.ndarray:
        """The document that each of the tokens [start, stop) is of, int32, the first one's number being 0."""
        begins = np.zeros(stop - start, np.int32)
        before = 0
        for shard, first, last in self._within(start, stop):
            starts = shard.starts
            low, high = np.searchsorted(starts, (first, last))
            begins[starts[low:high] - first + before] = 1
            before += last - first
        begins[:1] = 0
        return np.cumsum(begins, dtype=np.int32)

    @cached_property
    def starts(self) -> DocumentStarts:
        """Where documents start."""
        return DocumentStarts([shard.starts for shard in self._shards], self._ends)

    def _within(self, start: int, stop: int):
        """Each shard that has some of the tokens [start, stop), with the range of them in it."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not within {len(self)} tokens")
        shard = bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[shard] - len(self._shards[shard])
            end = min(stop, self._ends[shard])
            yield self._shards[shard], start - first, end - first
            start = end
            shard += 1


class DocumentStarts:
    """Where the documents of a dataset start, read from the files when asked. `len` is the number of documents."""

    def __init__(self, starts: list[np.ndarray], ends: list[int]):
        self._starts, self._ends = starts, ends
        self._counts = np.cumsum([0, *map(len, starts)])

    def __len__(self) -> int:
        return int(self._counts[-1])

    def bounds(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token and last + 1 of the documents `numbers`, int64."""
        return self._at(numbers), self._at(numbers + 1)

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        found = np.full(len(numbers), self._ends[-1] if self._ends else 0, np.int64)  # for the number after the last
        shards = np.searchsorted(self._counts, numbers, side="right") - 1
        for shard in np.unique(shards[shards < len(self._starts)]):
            chosen = shards == shard
            before = self._ends[shard - 1] if shard else 0
            found[chosen] = self._starts[shard][numbers[chosen] - self._counts[shard]] + before
        return found


class _Shard:
    """The files of one shard. `len` is the number of tokens."""

    def __init__(self, folder: Path, shard: Shard, dtype: str):
        self._folder, self._shard = folder, shard
        self.tokens = self._mapped(shard.file, np.dtype(dtype).newbyteorder("<"), DTYPES[dtype])

    def __len__(self) -> int:
        return self._shard.tokens

    @cached_property
    def starts(self) -> np.ndarray:
        """Where documents start, int64, rising. Raises DataError for a file of anything else."""
        path = self._folder / self._shard.index
        with os_errors_as(DataError, "read", path):
            try:
                starts = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise DataError(f"{path} is not an array: {error}", "preparing the data again") from error
        if starts.dtype != np.int64 or starts.ndim != 1 or not self._rising(starts):
            problem = f"rising document starts in {len(self)} tokens are needed"
            raise DataError(f"{path}: {problem}, this is {starts.dtype} {starts.shape}", "preparing the data again")
        return starts

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, np.uint8) if self._mask is None else self._mask[start:stop]

    @cached_property
    def _mask(self) -> np.ndarray | None:
        return None if self._shard.mask is None else self._mapped(self._shard.mask_file, np.dtype(np.uint8), 1)

    def _mapped(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        path = self._folder / name
        with os_errors_as(DataError, "read", path):
            there = path.stat().st_size
            if there != len(self) * size:
                wanted = f"the manifest's field 'tokens' says {len(self)} tokens"
                raise DataError(f"{path} has {there} bytes, but {wanted}", "preparing the data again")
            return np.memmap(path, dtype, mode="r") if there else np.empty(0, dtype)

    def _rising(self, starts: np.ndarray) -> bool:
        last = -1
        for first in range(0, len(starts), _CHECKED):
            part = starts[first : first + _CHECKED]
            if part[0] <= last or (np.diff(part) <= 0).any():
                return False
            last = int(part[-1])
        return last < len(self)


def _joined(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
