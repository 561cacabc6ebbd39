"""One training step: the whole graph, from tokens to updated weights, compiled once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import pairwise
from operator import itemgetter
from typing import Any, Protocol

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.device import num_batch_shards
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx, tree_flatten, tree_map, tree_unflatten
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.model import Decoder
from mlxlm.model.experts import mixtures_of
from mlxlm.plan.training import updated_at_once
from mlxlm.train.cpu_data_parallel import CPUDataParallel
from mlxlm.train.low_precision import separate_kernels
from mlxlm.train.optimizers import make_optimizer
from mlxlm.train.settings import TrainSettings

Arrays = dict[str, mx.array]  # of a batch, by name, each of shape [B, ...]
LossSums = tuple[mx.array, mx.array, dict[str, mx.array]]
Loss = Callable[..., LossSums]  # see `TrainStep`


class NamedArrays(Protocol):
    """A batch: a named tuple of arrays `[B, ...]`, None for those that it doesn't have. See `mlxlm.data.Batch`."""

    def _asdict(self) -> dict[str, Any]: ...


def cross_entropy_loss(
    model: Decoder, tokens: mx.array, segment_ids: mx.array | None = None, loss_weights: mx.array | None = None
) -> LossSums:
    """Compute the cross-entropy in nats over the targets of a batch, times their weights: the `loss` of a `TrainStep`.

    Args:
        model: The model.
        tokens: Int `[B, T + 1]`.
        segment_ids: Int `[B, T]`, see `mlxlm.data.Batch`.
        loss_weights: The loss mask, float32 `[B, T]`.
    """
    hidden, targets = model.model(tokens[:, :-1], segment_ids=segment_ids), tokens[:, 1:]
    total = model.cross_entropy(hidden, targets, loss_weights, training=True)
    return total, mx.array(float(targets.size)) if loss_weights is None else loss_weights.sum(), {}


def mean_loss(model: Decoder, loss: Loss, batches: Iterable[NamedArrays]) -> tuple[float, dict[str, float]]:
    """Return the mean of a loss over batches, in evaluation mode, and its metrics; NaN for one without any value."""
    training, sums = model.training, []
    model.eval()
    try:
        for batch in batches:
            sums.append(loss(model, **_arrays([batch])[0]))
            eval_arrays(sums[-1])
    finally:
        model.train(training)
    means = {}
    for name in sums[0][2]:
        total, count = (math.fsum(metrics[name][i].item() for *_, metrics in sums) for i in range(2))
        means[name] = total / count if count else math.nan
    return math.fsum(total.item() for total, *_ in sums) / math.fsum(count.item() for _, count, _ in sums), means


def update_ema(
    ema: Mapping[str, mx.array], weights: Mapping[str, mx.array], decay: float, step: mx.array
) -> dict[str, mx.array]:
    """Return the exponential moving average of the weights after step number `step` (from 1, a scalar array).

    d · average + (1 - d) · weight, which predicts better than the weights between two noisy steps (Polyak & Juditsky
    1992). d is `decay`, but at most (1 + step) / (10 + step), so that the first weights are soon forgotten: the average
    is over about the last ninth of the steps until it is over 1 / (1 - decay) of them.
    """
    step = step.astype(mx.float32)
    rate = 1 - mx.minimum(decay, (1 + step) / (10 + step))
    return {name: average + rate * (weights[name] - average) for name, average in ema.items()}


class TrainStep:
    """Computes gradients and updates a model. Owns everything that a step changes.

    The weights are float32, or with `settings.param_dtype` bfloat16. For each forward pass they are converted to
    `settings.dtype`, that of products and activations. The loss, sums of gradients, their norm and the update stay
    float32.

    A step has two parts: gradients, which change nothing, and the update, which writes over weights, optimizer state
    and gradients, so that with AdamW it takes no more than these 16 bytes per parameter. It does so for some parameters
    after the others.

    With `settings.ema_decay`, an average of the weights is kept, which is evaluated and saved as the model.

    Args:
        model: The model.
        settings: Settings of the run.
        process_group: The processes that train together.
        loss: The loss, called with the model and the arrays of a batch by name. The rows of a batch may be divided into
            parts, so all its results are sums, which are added over a step: the loss (a float32 scalar), what that is
            divided by (a number of tokens or pairs, a float32 scalar), and metrics by name (each a float32 array `[2]`:
            a sum, and what that is divided by).

    Attributes:
        micro_batches: Parts of the rows of a batch whose gradients are computed one after another and summed: more take
            less memory. The sums are rounded differently, and dropout draws other numbers.
    """

    def __init__(
        self,
        model: Decoder,
        settings: TrainSettings,
        process_group: ProcessGroup | None = None,
        loss: Loss = cross_entropy_loss,
    ):
        self.model, self.settings, self.process_group = model, settings, process_group or ProcessGroup()
        self._loss_function = loss
        self._dtype = getattr(mx, settings.dtype)
        self._rounds = settings.param_dtype != "float32" or settings.optimizer_state != "float32"
        self.micro_batches = 1
        model.model.grad_checkpoint = settings.grad_checkpoint
        for experts in mixtures_of(model.layers):
            experts.router_aux_loss, experts.router_z_loss = settings.router_aux_loss, settings.router_z_loss
        param_dtype = getattr(mx, settings.param_dtype)
        model.update(tree_map(lambda weight: weight.astype(param_dtype), model.trainable_parameters()))
        self._optimizer = make_optimizer(settings, model)
        self._optimizer.init(model.trainable_parameters())
        weights = self._parameters()
        self._ema = {n: w.astype(mx.float32) + 0 for n, w in weights.items()} if settings.ema_decay else {}
        self._groups = _group_names(weights)
        random = mx.random.state
        self._compiled_sums = mx.compile(self._gradient_sums, inputs=[model.state, random], outputs=random)
        self._compiled_updates = [mx.compile(self._update, inputs=self.state, outputs=self.state) for _ in self._groups]
        self._shard_batches(num_batch_shards(settings.batch_size))

    def __call__(
        self, batches: Sequence[NamedArrays], learning_rate: float
    ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        """Update the model on the sum of the gradients of `batches`.

        All steps have as many batches, of one shape. With several ranks, each passes its own batches, and the sums are
        over those of all.

        Returns:
            The mean loss (of cross-entropy: in nats per token, weighted by the loss mask), the gradient's norm before
            clipping, and the loss's metrics; not evaluated: evaluate them with `state`. The first two are 0 if there is
            nothing to learn.

        Raises:
            RankLostError: A rank is lost. `state` is as it was before, as after any error before the update.
        """
        # A small model is updated in one graph with its gradients, unless this is a CPU, where nothing waits for it.
        evaluate = eval_arrays if ON_CPU or len(self._groups) > 1 else lambda *_: None
        sums = self._sums(batches)
        evaluate(sums)
        total = _add([{name: x for name, x in part.items() if name != "gradients"} for part in sums])
        parts = [dict(tree_flatten(part.pop("gradients"))) for part in sums]
        groups, squares = [], mx.array(0.0)
        for names in self._groups:
            gradients = _add([{name: part.pop(name) for name in names} for part in parts])
            squares = squares + sum(g.square().sum() for g in gradients.values())
            evaluate(gradients, squares)
            groups.append(gradients)
        count = mx.where(total["count"] > 0, total["count"], 1.0)  # 0 if there is nothing to learn
        norm, max_norm, step = mx.sqrt(squares) / count, self.settings.grad_clip, self._optimizer.optimizers[0].step
        factor = mx.minimum(max_norm / (norm + 1e-6), 1.0) / count if max_norm > 0 else 1 / count
        self._optimizer.learning_rate = mx.array(learning_rate, mx.float32)
        for update in self._compiled_updates:
            update(groups.pop(0), factor, step)
            evaluate(self.state)
        metrics = total.get("metrics", {})  # MLX's average over ranks leaves out an empty dictionary
        return total["loss"] / count, norm, {name: x[0] / x[1] for name, x in metrics.items()}

    def _sums(self, batches: Sequence[NamedArrays]) -> list[dict[str, Any]]:
        """Return the `_gradient_sums` of the parts of `batches`, or with several ranks their mean."""
        weights, key = self._parameters(), mx.random.state[0]
        try:
            if self.process_group.size == 1:
                return self._local_sums(batches)
            next_key, *keys = mx.random.split(key, 1 + self.process_group.size)
            _set_random_key(keys[self.process_group.rank])  # another dropout on each rank
            mean = self.process_group.average(_add(self._local_sums(batches)))
            _set_random_key(next_key)
            return [mean]
        except BaseException:  # a graph that could not be traced leaves arrays without values in the state
            self.model.load_weights(list(weights.items()))
            _set_random_key(key)
            raise

    def _local_sums(self, batches: Sequence[NamedArrays]) -> list[dict[str, Any]]:
        return (
            [self._compiled_sums(_arrays(batches))] if self._workers is None else self._workers(_named_arrays(batches))
        )

    @property
    def environment(self) -> dict[str, Any]:
        """What decides how sums are rounded here, other than settings and data, as JSON values."""
        return {
            "chip": platform.chip(),
            "blas": load_blas().name,
            "num_processes": self.process_group.size,
            "parts": self._parts,
            "micro_batches": self.micro_batches,
        }

    def match_environment(self, environment: Any, micro_batches: int | None = None) -> str | None:
        """Divide batches as in `environment`, that of a checkpoint, so that a resumed run is the same to the bit.

        Args:
            environment: The environment.
            micro_batches: Of this process; None: as in `environment`. At most one for each row.

        Returns:
            A warning if it can't be the same on this chip. On another chip nobody expects it.
        """
        if micro_batches is not None:
            self.micro_batches = min(micro_batches, self.settings.batch_size)
        here = self.environment
        same = ("chip", "num_processes")
        if not isinstance(environment, dict) or any(here[name] != environment.get(name) for name in same):
            return None
        if here["blas"] != environment.get("blas"):
            return (
                f"matrix products are computed by {here['blas']}, before by {environment.get('blas')}: the weights "
                "will not be those of a run without interruption, to the bit (see mlxlm doctor)"
            )
        parts, before = environment.get("parts"), environment.get("micro_batches", 1)
        if isinstance(parts, int) and 1 <= parts <= self.settings.batch_size and parts != self._parts:
            self._shard_batches(parts)
        if micro_batches is None and isinstance(before, int) and 1 <= before <= self.settings.batch_size:
            self.micro_batches = before
        if self.micro_batches != before:
            return (
                f"each batch is computed in {self.micro_batches} parts, before in {before}: the weights will not be "
                "those of a run without interruption, to the bit"
            )
        return None

    def _shard_batches(self, parts: int) -> None:
        """Compute the gradients of the rows of a batch in `parts`, on as many CPU cores."""
        self._parts = parts
        self._workers = CPUDataParallel(self._gradient_sums, self.model.state, parts) if parts > 1 else None

    @property
    def state(self) -> list[Any]:
        """Everything that a step changes: weights, optimizer, EMA, random state."""
        optimizers = [o.state for o in self._optimizer.optimizers]
        return [self.model.state, optimizers, self._ema, mx.random.state]

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Give the model the weights of `weights` inside the block: the EMA weights if there are any.

        bfloat16 weights get the compute dtype: a CPU computes bfloat16 products many times slower than float32.
        """
        parameters, converts = self._parameters(), self.settings.param_dtype != self.settings.dtype == "float32"
        if not self._ema and not converts:
            yield
            return
        weights = self.weights()
        if converts:
            weights = {name: weight.astype(self._dtype) for name, weight in weights.items()}
        self.model.load_weights(list(weights.items()))
        try:
            yield
        finally:
            self.model.load_weights(list(parameters.items()))

    def weights(self) -> dict[str, mx.array]:
        """Return the weights of the trained model by name: the EMA weights, in float32, if there are any."""
        return dict(self._ema) or self._parameters()

    def save_state(self) -> dict[str, mx.array]:
        """Return what a checkpoint needs apart from `weights`: optimizer, random state, and the EMA's weights."""
        raw = {f"weights.{name}": weight for name, weight in self._parameters().items()} if self._ema else {}
        return dict(sorted([*tree_flatten(self._optimizer.state), *raw.items(), ("random", mx.random.state[0])]))

    def load(self, weights: dict[str, mx.array], state: dict[str, mx.array]) -> None:
        """Load the results of `weights` and `save_state`. Raises ValueError if names or shapes differ."""
        for loaded, current in ((weights, self.weights()), (state, self.save_state())):
            if {n: x.shape for n, x in loaded.items()} != {n: x.shape for n, x in current.items()}:
                raise ValueError("the weights or the optimizer's state are of another model")
        raw = {n.removeprefix("weights."): x for n, x in state.items() if n.startswith("weights.")}
        dtype = getattr(mx, self.settings.param_dtype)
        self.model.load_weights([(name, weight.astype(dtype)) for name, weight in (raw or weights).items()])
        self._ema.update(weights if self._ema else {})
        _set_random_key(state["random"])
        optimizer_states = tree_unflatten([(n, x) for n, x in state.items() if n.startswith("states.")])["states"]
        for optimizer, values in zip(self._optimizer.optimizers, optimizer_states, strict=True):
            optimizer.state.update(values)

    def _parameters(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.model.trainable_parameters()))

    def _gradient_sums(self, batches: list[Arrays]) -> dict[str, Any]:
        """Return the sums over `batches`: gradients, loss, count and metrics."""
        parameters = self.model.trainable_parameters()
        loss_and_grad = mx.value_and_grad(self._loss)
        sums: dict[str, Any] | None = None
        for arrays in [part for batch in batches for part in _divide(batch, self.micro_batches)]:
            if sums is not None:  # keep the activations of one part at a time: this one waits for the last
                *waiting, sums["loss"] = mx.depends([*arrays.values(), sums["loss"]], _leaves(sums["gradients"]))
                arrays = dict(zip(arrays, waiting, strict=True))
            (loss, count, metrics), gradients = loss_and_grad(parameters, arrays)
            more = {"gradients": gradients, "loss": loss, "count": count, "metrics": metrics}
            sums = more if sums is None else _add([sums, more])
        self.model.update(parameters)
        assert sums is not None  # a step has a batch
        return sums

    def _loss(self, parameters: dict[str, Any], arrays: Arrays) -> LossSums:
        self.model.update(tree_map(lambda weight: weight.astype(self._dtype), parameters))
        return self._loss_function(self.model, **arrays)

    def _update(self, gradients: dict[str, mx.array], factor: mx.array, step: mx.array) -> None:
        """Update the parameters that have `gradients`, times `factor`, after `step` steps."""
        key = mx.random.randint(0, 1 << 31, dtype=mx.uint32) if self._rounds else None
        for optimizer in self._optimizer.optimizers:
            optimizer.state["step"], optimizer.key = step, key
        scaled = {name: separate_kernels([g * factor], factor)[0] for name, g in gradients.items()}
        self._optimizer.update(self.model, tree_unflatten(list(scaled.items())))
        if self._ema:
            ema, weights = ({name: arrays[name] for name in gradients} for arrays in (self._ema, self._parameters()))
            self._ema.update(update_ema(ema, weights, self.settings.ema_decay, step + 1))


def _group_names(weights: Mapping[str, mx.array]) -> list[list[str]]:
    """Divide the names of parameters into groups that are updated one after another."""
    groups: list[list[str]] = [[]]
    limit, size = updated_at_once(sum(w.size for w in weights.values())), 0
    for name, weight in weights.items():
        if size + weight.size > limit and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += weight.size
    return groups


def _named_arrays(batches: Sequence[NamedArrays]) -> list[dict[str, Any]]:
    """The arrays that each batch has."""
    return [{name: x for name, x in batch._asdict().items() if x is not None} for batch in batches]


def _arrays(batches: Sequence[NamedArrays]) -> list[Arrays]:
    return [{name: mx.array(x) for name, x in batch.items()} for batch in _named_arrays(batches)]


def _divide(batch: Arrays, parts: int) -> list[Arrays]:
    """Divide the rows of a batch into `parts`, or fewer if it has fewer rows."""
    rows = len(next(iter(batch.values())))
    if (parts := min(parts, rows)) == 1:
        return [batch]
    bounds = pairwise(i * rows // parts for i in range(parts + 1))
    return [tree_map(itemgetter(slice(*bound)), batch) for bound in bounds]


def _add(sums: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the results of all parts of a step, in float32 unless there is only one."""
    return reduce(partial(tree_map, lambda a, b: a.astype(mx.float32) + b), sums)


def _leaves(tree: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(tree)]


def _set_random_key(key: mx.array) -> None:
    """Make `key` the state of MLX's global random numbers."""
    high, low = key.tolist()
    mx.random.seed(high << 32 | low)  # the seed is the key, in two halves
