"""What the steps of a run are fed with."""

from __future__ import annotations

from mlxlm.data import Batch, TokenDataset, TrainBatches
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.run import Run


class StepBatches:
    """The batches of each step of `run`, or this rank's share of them.

    Attributes:
        dropped_fraction: the share of the drawn text that an epoch leaves out, because it doesn't fit into rows.
        padding: the share of the rows that is padding.

    Raises DataError for data that can't be used, PlatformError if the ranks can't share a step's batches equally.
    """

    def __init__(self, run: Run, process_group: ProcessGroup):
        settings = run.settings
        self._each = process_group.batches_per_process(settings.grad_accumulation_steps)
        self._batches = TrainBatches(
            TokenDataset.open(run.data, "train"), settings.batch_size, settings.max_seq_length, settings.seed,
            packing=settings.packing, document_mask=settings.document_mask, mask_prompt=settings.mask_prompt,
            rank=process_group.rank, num_processes=process_group.size,
        )  # fmt: skip
        self.dropped_fraction, self.padding = self._batches.dropped_fraction, self._batches.padding

    def read(self, done: int) -> list[Batch]:
        """The batches of step number `done`, from 1."""
        first = (done - 1) * self._each
        return [self._batches.batch(first + i) for i in range(self._each)]

    def epochs(self, done: int) -> dict[str, float]:
        """How many epochs of each source all ranks have seen after step `done`."""
        return self._batches.epochs(done * self._each)

    def epoch_at(self, done: int) -> float:
        """How many epochs all ranks have seen after step `done`: rows of all sources, by the rows that they have."""
        return self._batches.epoch_at(done * self._each)
