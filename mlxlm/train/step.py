"""One training step: the whole graph, from tokens to updated weights, compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlm._mlx import mx, optim, tree_flatten, tree_map, tree_unflatten
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train.loss import summed_loss
from mlxlm.train.ranks import Ranks
from mlxlm.train.settings import TrainSettings

Arrays = tuple[mx.array, mx.array | None, mx.array | None]  # of a Batch


class TrainStep:
    """AdamW (Loshchilov & Hutter 2019) on a model, its state owned here.

    Decay applies to matrices only: pulling norms and biases to zero has no regularising effect (nanoGPT
    and GPT-3 do the same).
    """

    def __init__(self, model: Decoder, settings: TrainSettings, ranks: Ranks | None = None):
        self.model, self.settings, self.ranks = model, settings, ranks or Ranks.alone()

        def adamw(decay: float) -> optim.AdamW:
            return optim.AdamW(
                settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                weight_decay=decay,
                bias_correction=True,
            )

        self._optimizer = optim.MultiOptimizer(
            [adamw(settings.weight_decay), adamw(0.0)], [lambda _name, weight: weight.ndim >= 2]
        )
        self._optimizer.init(model.trainable_parameters())
        mx.random.seed(settings.seed)
        self._step = mx.compile(self._update, inputs=self.state, outputs=self.state)
        if self.ranks.size > 1:
            self._own_sums = mx.compile(self._sums, inputs=[model.state, mx.random.state], outputs=mx.random.state)
            self._use_sums = mx.compile(self._use, inputs=self.state, outputs=self.state)

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> tuple[mx.array, mx.array]:
        """Update the model on one batch after another, their gradients added: one step.

        All steps have as many batches, of one shape. Returns the mean loss in nats per token, each counted by its
        weight, and the gradient's norm before clipping; not evaluated: evaluate them with `state`.

        With several ranks each gives its own batches, and the sums are over those of all. Raises RankLost, and leaves
        `state` as it was, if one is lost.
        """
        arrays = [tuple(None if part is None else mx.array(part) for part in batch) for batch in batches]
        rate = mx.array(learning_rate, mx.float32)
        if self.ranks.size == 1:
            return self._step(arrays, rate)
        key = mx.random.state[0]
        following, *keys = mx.random.split(key, 1 + self.ranks.size)
        mx.random.state[0] = keys[self.ranks.rank]  # each rank drops out elements of its own
        try:
            # Out of the compiled graph: no weight is touched before all sums have come.
            sums = self.ranks.summed(self._own_sums(arrays))
        except BaseException:
            mx.random.state[0] = key
            raise
        mx.random.state[0] = following
        return self._use_sums(sums, rate)

    @property
    def state(self) -> list[Any]:
        """Everything that a step changes: weights, optimizer, random state."""
        return [self.model.state, [o.state for o in self._optimizer.optimizers], mx.random.state]

    def save_state(self) -> dict[str, mx.array]:
        """Optimizer and random state as named arrays."""
        return dict(sorted([*tree_flatten(self._optimizer.state), ("random", mx.random.state[0])]))

    def load_state(self, arrays: dict[str, mx.array]) -> None:
        """Continue from what `save_state` gave. Raises ValueError if the names or shapes differ."""
        wanted = {name: value.shape for name, value in self.save_state().items()}
        if wanted != {name: value.shape for name, value in arrays.items()}:
            raise ValueError("the optimizer state is of another model")
        high, low = arrays["random"].tolist()
        mx.random.seed(high << 32 | low)  # the seed is the key, in two halves
        loaded = tree_unflatten([(k, v) for k, v in arrays.items() if k != "random"])
        for optimizer, state in zip(self._optimizer.optimizers, loaded["states"], strict=True):
            optimizer.state.update(state)

    def _update(self, batches: list[Arrays], learning_rate: mx.array) -> tuple[mx.array, mx.array]:
        return self._use(self._sums(batches), learning_rate)

    def _sums(self, batches: list[Arrays]) -> dict[str, Any]:
        """Over the tokens of `batches`: their gradients, loss and count."""
        parameters = self.model.trainable_parameters()
        total, gradients = self._gradients(parameters, batches)
        self.model.update(parameters)
        count = sum(_count(tokens, weights) for tokens, _, weights in batches)
        return {"gradients": gradients, "loss": total, "count": count}

    def _use(self, sums: dict[str, Any], learning_rate: mx.array) -> tuple[mx.array, mx.array]:
        """Update the model; what `_sums` gave is divided once: every token weighs the same, whichever part of a step
        and whichever rank it is in."""
        count = sums["count"]
        gradients = tree_map(lambda g: g / count, sums["gradients"])
        norm = mx.sqrt(sum(g.square().sum() for _, g in tree_flatten(gradients)))
        if self.settings.clip > 0:
            factor = mx.minimum(self.settings.clip / (norm + 1e-6), 1.0)
            gradients = tree_map(lambda g: g * factor, gradients)
        self._optimizer.learning_rate = learning_rate
        self._optimizer.update(self.model, gradients)
        return sums["loss"] / count, norm

    def _gradients(self, parameters: dict, batches: list[Arrays]) -> tuple[mx.array, dict]:
        """The loss over all `batches` and its gradients, summed over tokens."""
        loss_and_gradient = mx.value_and_grad(self._loss)
        total, gradients = mx.array(0.0), None
        for tokens, segments, weights in batches:
            if gradients is not None:  # one micro-batch's activations at a time: this one waits for the last
                tokens, total = mx.depends([tokens, total], [g for _, g in tree_flatten(gradients)])
            loss, gradient = loss_and_gradient(parameters, tokens, segments, weights)
            total = total + loss
            gradients = gradient if gradients is None else tree_map(mx.add, gradients, gradient)
        return total, gradients

    def _loss(self, parameters: dict, *batch: mx.array | None) -> mx.array:
        self.model.update(parameters)
        return summed_loss(self.model, *batch)


def _count(tokens: mx.array, weights: mx.array | None) -> mx.array:
    """What the targets of a batch count together."""
    return mx.array(float(tokens[:, 1:].size)) if weights is None else weights.sum()
