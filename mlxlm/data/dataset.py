"""Prepared tokens, memory-mapped."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from mlxlm.data.manifest import DTYPES, SPLITS, Manifest
from mlxlm.errors import DataError, os_errors_as


class TokenDataset:
    """One split of a prepared folder, as one long sequence of tokens.

    `len` is the number of tokens. Attributes:
        documents, bytes: of this split; bytes are UTF-8 bytes of the text.
        vocab_size, fingerprint: the tokenizer's.
        split, manifest: the split's name, and the manifest of the whole folder.
    """

    def __init__(self, manifest: Manifest, split: str, shards: list[np.ndarray]):
        self.manifest = manifest
        self.split = split
        self.documents: int = getattr(manifest, split).documents
        self.bytes: int = getattr(manifest, split).bytes
        self.vocab_size = manifest.vocab_size
        self.fingerprint = manifest.fingerprint
        self._shards = shards
        self._ends = list(accumulate(len(shard) for shard in shards))

    @classmethod
    def open(cls, folder: str | Path, split: str) -> TokenDataset:
        """Map the shards of `split` ("train" or "validation").

        Raises DataError, naming the file and the field, for a folder that is not a complete prepared dataset.
        """
        if split not in SPLITS:
            raise DataError(f"no split '{split}'", " or ".join(SPLITS))
        folder = Path(folder)
        manifest = Manifest.read(folder)
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        shards = []
        for shard in getattr(manifest, split).shards:
            path = folder / shard.file
            with os_errors_as(DataError, "read", path):
                size = path.stat().st_size
                if size != shard.tokens * DTYPES[manifest.dtype]:
                    wanted = f"the manifest's field 'tokens' says {shard.tokens} tokens"
                    raise DataError(f"{path} has {size} bytes, but {wanted}", "preparing the data again")
                if shard.tokens:
                    shards.append(np.memmap(path, dtype, mode="r"))
        return cls(manifest, split, shards)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), uint16 or uint32: a view of the file inside one shard, else a joined copy."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not within {len(self)} tokens")
        parts = []
        shard = bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[shard] - len(self._shards[shard])
            end = min(stop, self._ends[shard])
            part = self._shards[shard][start - first : end - first]
            if part.max() >= self.vocab_size:  # MLX would read past the end of the embedding
                raise DataError(f"the {self.split} data has a token {part.max()}, not below {self.vocab_size}")
            parts.append(part)
            start = end
            shard += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.dtype(self.manifest.dtype))
