"""What the steps of a run are fed with."""

from __future__ import annotations

from mlxlm.data import Batch, TokenDataset, TrainBatches
from mlxlm.train.distributed.process_group import Ranks
from mlxlm.train.run import Run


class Feed:
    """The batches of each step of `run`, or this rank's share of them.

    Attributes:
        cropped: the share of the drawn text that an epoch leaves out, because it doesn't fit into rows.
        padding: the share of the rows that is padding.

    Raises DataError for data that can't be used, PlatformError if the ranks can't share a step's batches equally.
    """

    def __init__(self, run: Run, ranks: Ranks):
        settings = run.settings
        self._each = ranks.share_of(settings.accumulate)
        self._batches = TrainBatches(
            TokenDataset.open(run.data, "train"), settings.batch_size, settings.sequence_length, settings.seed,
            packing=settings.packing, document_mask=settings.document_mask, answers_only=settings.answers_only,
            rank=ranks.rank, ranks=ranks.size,
        )  # fmt: skip
        self.cropped, self.padding = self._batches.cropped, self._batches.padding

    def read(self, done: int) -> list[Batch]:
        """The batches of step number `done`, from 1."""
        first = (done - 1) * self._each
        return [self._batches.batch(first + i) for i in range(self._each)]

    def epochs(self, done: int) -> dict[str, float]:
        """How many epochs of each source all ranks have seen after step `done`."""
        return self._batches.epochs(done * self._each)

    def epoch_of(self, done: int) -> float:
        """How many epochs all ranks have seen after step `done`: rows of all sources, by the rows that they have."""
        return self._batches.epoch_of(done * self._each)
