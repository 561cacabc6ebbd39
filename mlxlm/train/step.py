"""One training step: the whole graph, from tokens to updated weights, compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.cpu_cores import num_batch_shards
from mlxlm.backend.mlx import mx, tree_flatten, tree_map, tree_unflatten
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train.cpu_data_parallel import CPUDataParallel
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.train.ema import ema_weights
from mlxlm.train.loss import summed_loss
from mlxlm.train.optimizers import make_optimizer
from mlxlm.train.settings import TrainSettings

Arrays = tuple[mx.array, mx.array | None, mx.array | None]  # of a Batch


class TrainStep:
    """Gradients of a model and what an optimizer makes of them; all that a step changes is owned here.

    The weights are float32. With `settings.dtype` "bfloat16" they are rounded for each forward pass, whose products
    and activations are in it; the loss, the sums of gradients, their norm and the update stay float32.

    With `settings.ema_decay`, an average of the weights goes along: what is evaluated, and a checkpoint's model.
    """

    def __init__(self, model: Decoder, settings: TrainSettings, process_group: ProcessGroup | None = None):
        self.model, self.settings, self.process_group = model, settings, process_group or ProcessGroup.single_process()
        self._dtype = getattr(mx, settings.dtype)
        model.model.grad_checkpoint = settings.grad_checkpoint
        self._optimizer = make_optimizer(settings)
        self._optimizer.init(model.trainable_parameters())
        self._averages = {name: mx.array(weight) for name, weight in self._raw().items()} if settings.ema_decay else {}
        mx.random.seed(settings.seed)
        self._step = mx.compile(self._update, inputs=self.state, outputs=self.state)
        self._own_sums = mx.compile(self._sums, inputs=[model.state, mx.random.state], outputs=mx.random.state)
        self._use_sums = mx.compile(self._use, inputs=self.state, outputs=self.state)
        self._cut(num_batch_shards(settings.batch_size))

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> tuple[mx.array, mx.array]:
        """Update the model on one batch after another, their gradients added: one step.

        All steps have as many batches, of one shape. Returns the mean loss in nats per token, each counted by its
        weight, and the gradient's norm before clipping; not evaluated: evaluate them with `state`. Both are 0 where
        all weights are 0.

        With several ranks each gives its own batches, and the sums are over those of all. Raises RankLost if one is
        lost. After any error `state` is as it was.
        """
        held = self.weights(), self.save_state()
        try:
            return self._stepped(batches, mx.array(learning_rate, mx.float32))
        except BaseException:  # a graph that could not be traced leaves arrays without values in the state
            self.load(*held)
            raise

    def _stepped(self, batches: Sequence[Batch], rate: mx.array) -> tuple[mx.array, mx.array]:
        if self.process_group.size == 1:
            if self._workers is None:
                return self._step(_arrays(batches), rate)
            return self._use_sums(self._workers(batches), rate)
        following, *keys = mx.random.split(mx.random.state[0], 1 + self.process_group.size)
        _set_key(keys[self.process_group.rank])  # each rank drops out elements of its own
        # Out of the compiled graph: no weight is touched before all sums have come.
        parts = [self._own_sums(_arrays(batches))] if self._workers is None else self._workers(batches)
        sums = self.process_group.all_reduce(_added(parts))
        _set_key(following)
        return self._use_sums([sums], rate)

    @property
    def environment(self) -> dict[str, Any]:
        """What decides here how sums are rounded, beside settings and data: JSON's types."""
        return {
            "chip": platform.chip(),
            "blas": load_blas().name,
            "num_processes": self.process_group.size,
            "parts": self._parts,
        }

    def match_environment(self, environment: Any) -> str | None:
        """Cut batches as a step whose `environment` this is, where nothing else differs, however many cores there are now.

        Says what differs on the same chip; of another one nobody expects the same bits.
        """
        own = self.environment
        if (
            not isinstance(environment, dict)
            or own["chip"] != environment.get("chip")
            or own["num_processes"] != environment.get("num_processes")
        ):
            return None
        if own["blas"] != environment.get("blas"):
            return (
                f"products come from {own['blas']}, and came from {environment.get('blas')} before: the weights will not "
                "be those of a run without interruption, to the bit (mlxlm doctor tells more)"
            )
        parts = environment.get("parts")
        if isinstance(parts, int) and 1 <= parts <= self.settings.batch_size and parts != self._parts:
            self._cut(parts)
        return None

    def _cut(self, parts: int) -> None:
        self._parts = parts
        self._workers = CPUDataParallel(self._sums, self.model.state, parts) if parts > 1 else None

    @property
    def state(self) -> list[Any]:
        """Everything that a step changes: weights, optimizer, averages, random state."""
        optimizers = [o.state for o in self._optimizer.optimizers]
        return [self.model.state, optimizers, self._averages, mx.random.state]

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, where there are any."""
        raw = self._raw()
        self.model.load_weights(list(self.weights().items()))
        try:
            yield
        finally:
            self.model.load_weights(list(raw.items()))

    def weights(self) -> dict[str, mx.array]:
        """What the model is worth now, float32 by name: the averaged weights, or the only ones."""
        return dict(self._averages) or self._raw()

    def save_state(self) -> dict[str, mx.array]:
        """All that is to be kept beside `weights`, as named arrays: optimizer, random state and, where `weights` are
        averages, what they are averages of."""
        raw = {f"weights.{name}": weight for name, weight in self._raw().items()} if self._averages else {}
        return dict(sorted([*tree_flatten(self._optimizer.state), *raw.items(), ("random", mx.random.state[0])]))

    def load(self, weights: dict[str, mx.array], state: dict[str, mx.array]) -> None:
        """Continue from what `weights` and `save_state` gave. Raises ValueError if names or shapes differ."""
        for given, own in ((weights, self.weights()), (state, self.save_state())):
            if {n: x.shape for n, x in given.items()} != {n: x.shape for n, x in own.items()}:
                raise ValueError("the weights or the optimizer's state are of another model")
        raw = {n.removeprefix("weights."): x for n, x in state.items() if n.startswith("weights.")}
        self.model.load_weights(list((raw or weights).items()))
        self._averages.update(weights if self._averages else {})
        _set_key(state["random"])
        loaded = tree_unflatten([(n, x) for n, x in state.items() if n.startswith("states.")])
        for optimizer, values in zip(self._optimizer.optimizers, loaded["states"], strict=True):
            optimizer.state.update(values)

    def _raw(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.model.trainable_parameters()))

    def _update(self, batches: list[Arrays], learning_rate: mx.array) -> tuple[mx.array, mx.array]:
        return self._use([self._sums(batches)], learning_rate)

    def _sums(self, batches: list[Arrays]) -> dict[str, Any]:
        """Over the tokens of `batches`: their gradients, loss and count."""
        parameters = self.model.trainable_parameters()
        total, gradients = self._gradients(parameters, batches)
        self.model.update(parameters)
        count = sum(_count(tokens, weights) for tokens, _, weights in batches)
        return {"gradients": gradients, "loss": total, "count": count}

    def _use(self, parts: list[dict[str, Any]], learning_rate: mx.array) -> tuple[mx.array, mx.array]:
        """Update the model; what `_sums` gave is divided once: every token weighs the same, whichever part of a step
        and whichever rank it is in."""
        sums = _added(parts)
        # 0 where a batch of a rank has nothing to be learned.
        count = mx.where(sums["count"] > 0, sums["count"], 1.0)
        gradients = tree_map(lambda g: g / count, sums["gradients"])
        norm = mx.sqrt(sum(g.square().sum() for _, g in tree_flatten(gradients)))
        if self.settings.grad_clip > 0:
            factor = mx.minimum(self.settings.grad_clip / (norm + 1e-6), 1.0)
            gradients = tree_map(lambda g: g * factor, gradients)
        self._optimizer.learning_rate = learning_rate
        self._optimizer.update(self.model, gradients)
        step = self._optimizer.optimizers[0].step
        self._averages.update(ema_weights(self._averages, self._raw(), self.settings.ema_decay, step))
        return sums["loss"] / count, norm

    def _gradients(self, parameters: dict, batches: list[Arrays]) -> tuple[mx.array, dict]:
        """The loss over all `batches` and its gradients, summed over tokens."""
        loss_and_gradient = mx.value_and_grad(self._loss)
        total, gradients = mx.array(0.0), None
        for tokens, segment_ids, weights in batches:
            if gradients is not None:  # one micro-batch's activations at a time: this one waits for the last
                tokens, total = mx.depends([tokens, total], [g for _, g in tree_flatten(gradients)])
            loss, gradient = loss_and_gradient(parameters, tokens, segment_ids, weights)
            total = total + loss
            gradients = gradient if gradients is None else tree_map(mx.add, gradients, gradient)
        return total, gradients

    def _loss(self, parameters: dict, *batch: mx.array | None) -> mx.array:
        self.model.update(tree_map(lambda weight: weight.astype(self._dtype), parameters))
        return summed_loss(self.model, *batch)


def _arrays(batches: Sequence[Batch]) -> list[Arrays]:
    return [tuple(None if part is None else mx.array(part) for part in batch) for batch in batches]


def _added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all parts of a step, of what `_sums` gave for each."""
    return reduce(partial(tree_map, mx.add), parts)


def _set_key(key: mx.array) -> None:
    """Make `key` the state of MLX's global random numbers."""
    high, low = key.tolist()
    mx.random.seed(high << 32 | low)  # the seed is the key, in two halves


def _count(tokens: mx.array, weights: mx.array | None) -> mx.array:
    """What the targets of a batch count together."""
    return mx.array(float(tokens[:, 1:].size)) if weights is None else weights.sum()
