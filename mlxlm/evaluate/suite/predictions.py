"""Next-token predictions on a text: their calibration, and their loss by position in the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.data import Document
from mlxlm.data.builtin import python_reference
from mlxlm.evaluate.loglikelihood import start_token_id
from mlxlm.evaluate.loss import first_tokens
from mlxlm.evaluate.suite.estimates import Estimate, bootstrap
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.kernels import cross_entropy
from mlxlm.utils.errors import CheckpointError, DataError

WINDOW = 512  # tokens, fewer if the context or the text is shorter
_MIN_WINDOWS, _MIN_WINDOW = 8, 16
_NUM_BINS = 10  # of confidence


@dataclass(frozen=True)
class Predictions:
    """Predictions of each token of windows of a text from those before it in the window, `[windows, positions]`.

    Attributes:
        losses: Negative log-probability of the token, in nats.
        confidences: Probability of the most likely token.
        correct: Whether the token was the most likely one.
    """

    losses: np.ndarray
    confidences: np.ndarray
    correct: np.ndarray

    def loss_by_position(self) -> dict[str, Estimate]:
        """The mean loss by the number of tokens before it in the window: "0", "1", "2 to 3", "4 to 7" and so on."""
        length = self.losses.shape[1]
        starts = [0, *(1 << i for i in range((length - 1).bit_length()))]
        means = {}
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            name = str(start) if end == start + 1 else f"{start} to {end - 1}"
            means[name] = bootstrap(self.losses[:, start:end].mean(axis=1), lambda sums: sums / len(self.losses))
        return means

    def bins(self) -> np.ndarray:
        """The predictions of each window by confidence, float64 `[windows, bins, 3]`.

        The bins divide the confidences from 0 to 1 equally. The last axis has the number of predictions, the sum of
        their confidences, and the number of correct ones.
        """
        index = np.minimum((self.confidences * _NUM_BINS).astype(int), _NUM_BINS - 1)
        members = index[..., None] == np.arange(_NUM_BINS)
        values = np.stack([np.ones_like(self.confidences), self.confidences, self.correct], axis=-1)
        return np.einsum("wpb,wpv->wbv", members.astype(np.float64), values)

    def calibration_error(self) -> Estimate:
        """The expected calibration error (Naeini et al. 2015; Guo et al. 2017) of the most likely token.

        This is the distance between confidence and accuracy in each bin, averaged over the predictions.
        """
        return bootstrap(self.bins(), lambda sums: np.abs(sums[..., 1] - sums[..., 2]).sum(-1) / sums[..., 0].sum(-1))

    def accuracy(self) -> Estimate:
        """The share of correct predictions."""
        return bootstrap(self.correct.mean(axis=1), lambda sums: sums / len(self.correct))

    def confidence(self) -> Estimate:
        """The mean confidence."""
        return bootstrap(self.confidences.mean(axis=1), lambda sums: sums / len(self.confidences))


def built_in_text() -> Iterator[Document]:
    """Python's language reference, which differs a little between versions of Python. Raises DataError without it."""
    answers = (message["content"] for chat in python_reference() for message in chat if message["role"] == "assistant")
    yield Document("the built-in text", (f"{answer}\n\n" for answer in answers))


def predict(
    lm: LoadedModel,
    documents: Iterable[Document],
    max_windows: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Predictions:
    """Predict the tokens of the beginning of a text, in windows that each begin without context.

    Args:
        lm: The model.
        documents: Texts, which are joined.
        max_windows: Of up to 512 tokens.
        progress: Called with the number of windows done and their number.

    Raises:
        DataError: The text is too short, or a conversation.
        CheckpointError: The model's logits are NaN.
    """
    start = lm.tokenizer.prefix_token_ids or [start_token_id(lm)]
    length = min(WINDOW, lm.config.max_position_embeddings - len(start))
    parts, _ = first_tokens(lm.tokenizer, documents, max_windows * length + len(start))
    tokens = [id for ids in parts for id in ids]
    tokens = tokens[len(lm.tokenizer.prefix_token_ids) :]
    length = min(length, len(tokens) // _MIN_WINDOWS)
    if length < _MIN_WINDOW:
        problem = f"the text has {len(tokens)} tokens, too few for the suite"
        raise DataError(problem, f"{_MIN_WINDOWS * _MIN_WINDOW} or more")
    count = min(max_windows, len(tokens) // length)
    rows = []
    for i in range(count):
        window = mx.array([start + tokens[i * length : (i + 1) * length]])
        logits = lm.model(window[:, :-1])[0, len(start) - 1 :].astype(mx.float32)
        targets, likeliest = window[0, len(start) :], logits.argmax(axis=-1)
        row = cross_entropy(logits, targets), mx.exp(-cross_entropy(logits, likeliest)), targets == likeliest
        eval_arrays(*row)
        rows.append([np.array(values, dtype=np.float64) for values in row])
        progress(i + 1, count)
    losses, confidences, correct = map(np.stack, zip(*rows, strict=True))
    if np.isnan(losses).any():
        raise CheckpointError("the model's logits are NaN", "a checkpoint without NaN")
    return Predictions(losses, confidences, correct)
