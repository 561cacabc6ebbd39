"""Preferences as training data: their encoding, the reference model's log-probabilities, and validation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.data import Chunk, Document
from mlxlm.data.manifest import SPLITS
from mlxlm.data.pairs import CHOSEN, MISMATCHED, REJECTED, PairDataset, save_reference_logps
from mlxlm.model import Decoder
from mlxlm.train.events import Preferences
from mlxlm.train.preference_losses import answer_logps
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import Loss, mean_loss
from mlxlm.utils.errors import DataError

Messages = list[dict[str, Any]]
_PAIR_HINT = '{"prompt": "...", "chosen": "...", "rejected": "..."}, with texts or messages'
_LABEL_HINT = '{"prompt": "...", "completion": "...", "label": true}, or "chosen" and "rejected"'


class _Encode(Protocol):
    def __call__(self, document: Document, max_tokens: int) -> Iterable[Chunk]: ...


class PreferenceEncoder:
    """Encodes preferences for `prepare`, as pairs of documents of `mlxlm.data.pairs`.

    For DPO and ORPO a pair is the chosen and the rejected answer after their prompt. For KTO it is an answer and, after
    the same prompt, the answer of the row before; a row with two answers makes two pairs. Of two conversations, the
    answers from the first difference on are learned.

    Args:
        encode: Encodes conversations, see `mlxlm.train.finetune.ConversationEncoder`.
        loss: "dpo", "orpo" or "kto".
        length: Targets of a row. Pairs with a longer document are left out.

    Attributes:
        chosen: Chosen or desirable answers.
        rejected: Rejected or undesirable answers.
        too_long: Pairs that were left out because a document is longer than a row.
        same: Rows that were left out because both answers are the same.
        needed_length: The sequence length that the longest document needs.
    """

    def __init__(self, encode: _Encode, loss: str, length: int):
        self._encode, self._loss, self._room = encode, loss, length + 1
        self._other: Messages | None = None  # the answer of the row before
        self.chosen = self.rejected = self.too_long = self.same = self.needed_length = 0

    def __call__(self, document: Document) -> list[Chunk]:
        """Return the documents of a row: pairs of two."""
        if document.messages is None or (document.rejected is None and (self._loss != "kto" or document.label is None)):
            hint = _LABEL_HINT if self._loss == "kto" else _PAIR_HINT
            raise DataError(f"{document.location} is not a preference", hint)
        if document.rejected == document.messages:
            self.same += 1
            return []
        if document.rejected is None:
            first = next((n for n, m in enumerate(document.messages) if m["role"] == "assistant" and m["weight"]), 0)
            answers = [(document.messages, CHOSEN if document.label else REJECTED)]
        else:
            both = list(zip(document.messages, document.rejected, strict=False))
            first = next((n for n, (one, other) in enumerate(both) if one != other), len(both))
            answers = [(document.messages, CHOSEN), (document.rejected, REJECTED)]
        encoded = [self._document(document, messages, first, kind) for messages, kind in answers]
        if self._loss != "kto":
            pairs = [encoded]
        else:
            other = self._mismatched(document, first, encoded[0])
            self._other = document.messages[first:]
            pairs = [[chunk, other] for chunk in encoded]
        return [chunk for pair in pairs if self._fits(pair) for chunk in pair]

    def _document(self, document: Document, messages: Messages, first: int, kind: int) -> Chunk:
        """Encode messages, of which those from `first` on are learned, up to the last token to learn."""
        weighted = [message if n >= first else {**message, "weight": 0} for n, message in enumerate(messages)]
        conversation = replace(document, messages=weighted, rejected=None)
        [chunk] = self._encode(conversation, 1 << 40)  # in one piece
        assert chunk.loss_mask is not None  # of every conversation
        stop = int(np.flatnonzero(chunk.loss_mask)[-1]) + 1
        mask = chunk.loss_mask[:stop] * np.uint8(kind)
        return Chunk(chunk.ids[:stop], chunk.text_bytes if kind == CHOSEN else 0, True, mask)

    def _mismatched(self, document: Document, first: int, example: Chunk) -> Chunk:
        """Return the prompt with the answer of the row before; of the first row, a token without any."""
        assert document.messages is not None  # checked by the caller
        if self._other is None:
            return Chunk(example.ids[:1], 0, True, np.zeros(1, np.uint8))
        return self._document(document, document.messages[:first] + self._other, first, MISMATCHED)

    def _fits(self, pair: list[Chunk]) -> bool:
        longest = max(len(chunk.ids) for chunk in pair)
        self.needed_length = max(self.needed_length, longest - 1)
        if longest > self._room:
            self.too_long += 1
            return False
        kinds = [int(chunk.loss_mask.max()) for chunk in pair if chunk.loss_mask is not None]
        self.chosen += CHOSEN in kinds
        self.rejected += REJECTED in kinds
        return True

    def event(self, context_length: int) -> Preferences:
        """Return the event for the log, which suggests a sequence length of at most `context_length`."""
        suggested = min(64 * -(-self.needed_length // 64), context_length)
        helps = self.too_long > 0 and suggested >= self._room
        counts = self.chosen, self.rejected, self.too_long, self.same
        return Preferences(self._loss, *counts, self._room - 1, suggested if helps else None)


def compute_reference_logps(model: Decoder, folder: Path, settings: TrainSettings) -> None:
    """Compute the log-probabilities of all answers in the prepared `folder` under `model`, and save them there."""
    length, batch_size = settings.max_seq_length, settings.batch_size
    model.eval()
    logps = {}
    for split in SPLITS:
        data = PairDataset.open(folder, split)
        logps[split] = np.zeros((len(data.starts), 2), np.float32)
        width, rows = data.pairs_per_row(length), data.rows(length)
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            batch = data.batch(part, length, width, None)
            for i in range(2):
                tokens, segment_ids, mask = (mx.array(x[:, i]) for x in batch[:3])
                found = np.array(answer_logps(model, tokens, segment_ids, mask, width)[0])
                for row, pairs in enumerate(part):
                    logps[split][pairs.start : pairs.stop, i] = found[row, : len(pairs)]
    save_reference_logps(folder, logps)


def evaluate_pairs(
    model: Decoder, data: PairDataset, loss: Loss, max_seq_length: int, batch_size: int, max_tokens: int
) -> tuple[float, float, float, dict[str, float]]:
    """Measure a loss of `mlxlm.train.preference_losses` on pairs.

    Args:
        model: Evaluated in evaluation mode, then set back to its mode.
        data: The pairs.
        loss: The loss.
        max_seq_length: Targets per row.
        batch_size: Rows per batch.
        max_tokens: At most as many rows as have this many targets (at least one), spread evenly over the data.

    Returns:
        The loss; the cross-entropy of the chosen answers, in nats per token and in bits per byte; and the metrics of
        the loss.
    """
    rows, width = data.rows(max_seq_length), data.pairs_per_row(max_seq_length)
    count = max(1, min(len(rows), max_tokens // (2 * max_seq_length)))
    chosen_rows = [rows[i * len(rows) // count] for i in range(count)]
    parts = (chosen_rows[first : first + batch_size] for first in range(0, count, batch_size))
    batches = (data.batch(part, max_seq_length, width, data.reference_logps) for part in parts)
    mean, means = mean_loss(model, loss, batches)
    chosen_tokens = int((data.loss_mask(0, len(data)) == CHOSEN).sum())
    bits_per_byte = means["nll_loss"] / math.log(2) * chosen_tokens / data.bytes
    return mean, means["nll_loss"], bits_per_byte, means
