"""The batches of each step of a run."""

from __future__ import annotations

from mlxlm.data import Batch, TokenDataset, TrainBatches
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.run import Run


class StepBatches:
    """The batches of each step of `run`, or this rank's share of them.

    Attributes:
        dropped_fraction: Fraction of the text that an epoch leaves out because it doesn't fit into rows.
        padding: Fraction of the rows that is padding.

    Raises:
        DataError: The data can't be used.
        PlatformError: The ranks can't share a step's batches equally.
    """

    def __init__(self, run: Run, process_group: ProcessGroup):
        settings = run.settings
        self._per_step = process_group.batches_per_process(settings.grad_accumulation_steps)
        self._batches = TrainBatches(
            TokenDataset.open(run.data, "train"), settings.batch_size, settings.max_seq_length, settings.seed,
            packing=settings.packing, document_mask=settings.document_mask, mask_prompt=settings.mask_prompt,
            rank=process_group.rank, num_processes=process_group.size,
        )  # fmt: skip
        self.dropped_fraction, self.padding = self._batches.dropped_fraction, self._batches.padding

    def read(self, step: int) -> list[Batch]:
        """Return the batches of step number `step`, from 1."""
        first = (step - 1) * self._per_step
        return [self._batches.batch(first + i) for i in range(self._per_step)]

    def epochs(self, step: int) -> dict[str, float]:
        """Return the epochs of each source that all ranks have seen after step `step`."""
        return self._batches.epochs(step * self._per_step)

    def epoch_at(self, step: int) -> float:
        """Return the epochs that all ranks have seen after step `step`: rows of all sources, by the rows they have."""
        return self._batches.epoch_at(step * self._per_step)
