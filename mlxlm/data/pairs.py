"""Batches of pairs of documents, such as a preferred answer and a rejected one, each after its prompt.

Documents 2k and 2k + 1 of a prepared folder are a pair. Their loss mask says what each token is: `CHOSEN`, `REJECTED`
or `MISMATCHED` in an answer, otherwise 0.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlxlm.data.batches import TrainBatches
from mlxlm.data.dataset import DocumentStarts, TokenDataset
from mlxlm.data.manifest import MANIFEST_FILE
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import DataError, os_errors_as

REFERENCE_FILE = "reference_logps.npz"  # beside the shards
CHOSEN, REJECTED = 1, 2
MISMATCHED = 3  # the answer to another prompt


class PairBatch(NamedTuple):
    """The input of one forward pass over pairs, whose first documents are in rows [:, 0] and second ones in [:, 1].

    Attributes:
        tokens: int32 `[B, 2, T + 1]`: inputs are [..., :-1], targets [..., 1:].
        segment_ids: int32 `[B, 2, T]`: the number of the pair in its row; padding has the next number.
        mask: float32 `[B, 2, T]`: 1 for each target in an answer.
        kinds: int32 `[B, 2, P]`: `CHOSEN`, `REJECTED` or `MISMATCHED` for the answers of the P pairs that a row can
            have, 0 for none.
        reference_logps: float32 `[B, 2, P]`: the reference model's log-probability of each answer, in nats. None if the
            loss has no reference model.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    mask: np.ndarray
    kinds: np.ndarray
    reference_logps: np.ndarray | None = None


class PairDataset(TokenDataset):
    """A split of a prepared folder of pairs. For packing, a pair is a document as long as the longer of the two."""

    @cached_property
    def reference_logps(self) -> np.ndarray | None:
        """The reference model's log-probabilities of the answers, float32 `[pairs, 2]`; None if there are none.

        Raises:
            DataError: They are of other data, or damaged.
        """
        path = self._folder / REFERENCE_FILE
        if not path.exists():
            return None
        hint = "an unchanged copy of the folder, or a new run"
        with os_errors_as(DataError, "read", path):
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    logps, digest = arrays[self.split], str(arrays["data_digest"])
            except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                raise DataError(f"{path} is damaged: {error}", hint) from error
        if digest != file_sha256(self._folder / MANIFEST_FILE, DataError):
            raise DataError(f"{path} is of other data than {self._folder}", hint)
        if logps.shape != (self.documents // 2, 2) or logps.dtype != np.float32 or not np.isfinite(logps).all():
            raise DataError(f"{path} is damaged: '{self.split}' is not one finite pair of numbers per pair", hint)
        return logps

    @cached_property
    def starts(self) -> Any:  # as DocumentStarts
        """Where pairs start."""
        return _PairStarts(DocumentStarts([shard.starts for shard in self._shards], self._ends))

    @cached_property
    def pair_starts(self) -> np.ndarray:
        """The first token of each pair, and the end of the last one: int64 `[pairs + 1]`."""
        return np.append(self.starts.bounds(np.arange(len(self.starts)))[0], len(self))

    def rows(self, max_seq_length: int) -> list[range]:
        """The pairs in order, as many in a row as fit `max_seq_length` + 1 tokens."""
        starts, stops = self.starts.bounds(np.arange(len(self.starts)))
        rows, first, used = list[range](), 0, 0
        for pair, size in enumerate((stops - starts).tolist()):
            if used + size > max_seq_length + 1:
                rows.append(range(first, pair))
                first, used = pair, 0
            used += size
        return [*rows, range(first, len(starts))]

    def pairs_per_row(self, max_seq_length: int) -> int:
        """The most pairs that a row of `max_seq_length` + 1 tokens can have."""
        starts, stops = self.starts.bounds(np.arange(len(self.starts)))
        sizes = np.cumsum(np.sort(stops - starts))
        return max(1, int(np.searchsorted(sizes, max_seq_length + 1, side="right")))

    def batch(
        self, rows: Sequence[Sequence[int]], length: int, width: int, reference_logps: np.ndarray | None
    ) -> PairBatch:
        """Return rows of pairs, by number.

        Args:
            rows: The pairs of each row.
            length: T.
            width: P.
            reference_logps: float32 `[pairs, 2]`, or None.
        """
        shape = len(rows), 2, length
        tokens = np.zeros((*shape[:2], length + 1), np.int32)
        segment_ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        kinds, reference = np.zeros((*shape[:2], width), np.int32), np.zeros((*shape[:2], width), np.float32)
        for row, pairs in enumerate(rows):
            used = [0, 0]
            for number, pair in enumerate(pairs):
                for i, (start, stop) in enumerate(self.starts.documents(pair)):
                    at, end = used[i], used[i] + stop - start
                    labels = self.loss_mask(start, stop)
                    tokens[row, i, at:end] = self.slice(start, stop)
                    segment_ids[row, i, at:] = number
                    mask[row, i, at : end - 1] = labels[1:] > 0
                    kinds[row, i, number] = labels.max()
                    if reference_logps is not None:
                        reference[row, i, number] = reference_logps[pair, i]
                    used[i] = end
            for i in range(2):
                segment_ids[row, i, used[i] :] = len(pairs)
        return PairBatch(tokens, segment_ids, mask, kinds, None if reference_logps is None else reference)


class _PairStarts:
    """Where pairs start, as `DocumentStarts`. `len` is the number of pairs."""

    def __init__(self, starts: DocumentStarts):
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) // 2

    def bounds(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token of pairs, and that plus the length of their longer document, int64."""
        (first, middle), (_, end) = self._starts.bounds(2 * pairs), self._starts.bounds(2 * pairs + 1)
        return first, first + np.maximum(middle - first, end - middle)

    def documents(self, pair: int) -> list[tuple[int, int]]:
        """First token and end (exclusive) of the two documents of a pair."""
        starts, stops = self._starts.bounds(np.array([2 * pair, 2 * pair + 1]))
        return list(zip(starts.tolist(), stops.tolist(), strict=True))


class PairBatches(TrainBatches):
    """Batches of pairs for training, see `TrainBatches`.

    Args:
        data: Training pairs.
        batch_size: Rows per batch, each with a row of first documents and one of second documents.
        max_seq_length: Targets per row.
        seed: Determines the order.
        options: Further arguments of `TrainBatches`.
    """

    def __init__(self, data: PairDataset, batch_size: int, max_seq_length: int, seed: int, **options: Any):
        super().__init__(data, batch_size, max_seq_length, seed, packing="best-fit", **options)
        self._width, logps = data.pairs_per_row(max_seq_length), data.reference_logps
        ends = np.cumsum([len(part.data.starts) for part in self._parts])
        self._reference_logps = [None] * len(ends) if logps is None else np.split(logps, ends[:-1])

    def batch(self, index: int) -> Any:
        """Batch number `index`, of `batch_size` rows: a PairBatch."""
        first, rows = (index * self._num_processes + self._rank) * self._batch_size, []
        for i in range(self._batch_size):
            source, row = self._mixture.locate(first + i)
            data: Any = self._parts[source].data
            starts = [span.start for span in self._packings[source].spans(row)]
            pairs = np.searchsorted(data.pair_starts, starts).tolist()
            rows.append(data.batch([pairs], self._max_seq_length, self._width, self._reference_logps[source]))
        arrays: Any = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*rows, strict=True))
        return PairBatch(*arrays)


def save_reference_logps(folder: Path, logps: Mapping[str, np.ndarray]) -> None:
    """Save log-probabilities by split, float32 `[pairs, 2]`, beside the shards of `folder`."""
    with os_errors_as(DataError, "write", folder / REFERENCE_FILE):
        arrays: Any = {**logps, "data_digest": file_sha256(folder / MANIFEST_FILE, DataError)}
        np.savez(folder / REFERENCE_FILE, **arrays)
