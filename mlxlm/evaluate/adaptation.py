"""Test-time training: predict a text window by window, and learn each window after it was predicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx, optim, tree_map
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.model import Decoder
from mlxlm.utils.errors import ConfigError

ADAPT_LEARNING_RATE = 1e-4
_BETAS = [0.9, 0.99]


class AdaptiveScorer:
    """Predicts windows, with one step of Adam after each: dynamic evaluation (Krause et al. 2018).

    The loss of the predicted tokens and its gradient come from the same forward pass, so no token is learned before it
    is predicted. It adapts a float32 copy of the weights; those of the model don't change.

    Args:
        lm: A model with weights that can be trained.
        context_length: Tokens of the longest window.
        learning_rate: Of Adam.

    Attributes:
        nats: Sum of the negative log-likelihood of the predicted tokens.
        tokens: Number of predicted tokens.

    Raises:
        ConfigError: The model is quantized, or runs on mlx_lm's classes.
    """

    def __init__(self, lm: LoadedModel, context_length: int, learning_rate: float = ADAPT_LEARNING_RATE):
        if not isinstance(lm.model, Decoder) or any(a.dtype == mx.uint32 for a in lm.weights):
            kind = "is quantized" if isinstance(lm.model, Decoder) else "runs on mlx_lm's classes"
            raise ConfigError(f"{lm.path} {kind}, so its weights can't be adapted", "a model that finetune can train")
        self.nats, self.tokens = 0.0, 0
        self._model, self._length = lm.model, context_length
        self._weights = tree_map(lambda weight: weight.astype(mx.float32), lm.model.trainable_parameters())
        self._optimizer = optim.Adam(learning_rate, betas=_BETAS, bias_correction=True)
        self._optimizer.init(self._weights)
        state = [self._optimizer.state]
        self._compiled_step = mx.compile(self._step, inputs=state, outputs=state)

    def add(self, window: list[int], new: int) -> None:
        """Predict the last `new` tokens of `window`, then learn them."""
        last = len(window) - 1
        tokens, loss_weights = np.zeros((1, self._length + 1), np.int32), np.zeros(self._length, np.float32)
        tokens[0, : last + 1], loss_weights[last - new : last] = window, 1
        nats, self._weights = self._compiled_step(self._weights, mx.array(tokens), mx.array(loss_weights))
        eval_arrays(nats, self._weights, self._optimizer.state)
        self.nats, self.tokens = self.nats + nats.item(), self.tokens + new

    def flush(self) -> None:
        """Do nothing: `add` predicts at once."""

    def _step(self, weights: Any, tokens: mx.array, loss_weights: mx.array) -> tuple[mx.array, Any]:
        model_weights = self._model.trainable_parameters()

        def mean_loss(weights: Any) -> mx.array:
            self._model.update(tree_map(lambda weight, original: weight.astype(original.dtype), weights, model_weights))
            hidden = self._model.model(tokens[:, :-1])[0]
            nats = self._model.cross_entropy(hidden, tokens[0, 1:], loss_weights, training=True)
            return nats / loss_weights.sum()

        loss, gradients = mx.value_and_grad(mean_loss)(weights)
        self._model.update(model_weights)
        return loss * loss_weights.sum(), self._optimizer.apply_gradients(gradients, weights)
