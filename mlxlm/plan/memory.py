"""Memory of mlxlm's own training step, by what holds it.

A step has two heights: during the backward pass, when the activations are there and the gradients come; and during
the update, when the gradients are all there and the optimizer makes new values beside the old. The higher one is the
peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.config import ModelConfig
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.plan.training import DTYPES, Training

# Fitted to MLX's peaks over the first four steps of a fresh process, over the presets from 0.3m to 50m and lengths from
# 128 to 1,024 on a CPU of two cores, in float32.
_LAYERS_AHEAD = 1  # where layers are recomputed
_SCORES_AT_A_TIME = 4  # arrays of one block's scores
# Where cores share a batch: their graphs are computed a piece at a time, so that gradients of activations, and those of
# weights even more, come when others have gone. That logits count twice is fitted, not explained.
_TRANSIENT_AT_ONCE, _GRADIENTS_AT_ONCE, _LOGITS_AT_ONCE = 0.6, 0.1, 2.0


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes. `layer`: activations that one layer keeps for its gradient; `activations`: of all layers and what
    surrounds them; `gradients`: of all parameters, once for each core that shares the batch, and where those accumulate
    once more for the last ones; `first_gradients`: those that are there while activations are; `logits`: of the head
    and the loss; `transient`: gradients of activations, and in the update new values beside old ones. `total` is the
    peak: the higher of `backward` and `update`.

    `total` is an estimate. It was compared with the shapes that the constants were fitted to, presets from 0.3m to 50m
    in float32 on a CPU of two cores, with vocabularies to 32,000, recomputation, averaging and Muon among them: all
    were within 9 %. Accumulation was compared apart, 15m and 50m on two cores: within 7 %. On one core a large model
    with few tokens takes up to a fifth less than planned. On other devices nobody has compared it."""

    weights: int
    compute_copy: int
    optimizer: int
    ema: int
    gradients: int
    first_gradients: int
    layer: int
    activations: int
    logits: int
    transient: int
    update_transient: int

    @property
    def states(self) -> int:
        """What stays from step to step."""
        return self.weights + self.optimizer + self.ema

    @property
    def backward(self) -> int:
        return self.states + self.compute_copy + self.first_gradients + self.activations + self.logits + self.transient

    @property
    def update(self) -> int:
        return self.states + self.gradients + self.update_transient

    @property
    def total(self) -> int:
        return max(self.backward, self.update)

    def parts(self) -> dict[str, int]:
        """What the peak consists of."""
        held = {"weights": self.weights, "optimizer": self.optimizer, "averaged weights": self.ema}
        if self.update > self.backward:
            held["gradients"] = self.gradients
            held["the update's new values"] = self.update_transient
        else:
            held |= {
                "gradients": self.first_gradients,
                "weights in half precision": self.compute_copy,
                "activations": self.activations,
                "logits": self.logits,
                "gradients of activations": self.transient,
            }
        return {name: size for name, size in held.items() if size}


def training_memory(config: ModelConfig, training: Training) -> TrainingMemory:
    """What a step of `mlxlm pretrain` holds at its peak."""
    count, size = config.parameter_count(), DTYPES[training.dtype]
    tokens = training.batch_size * training.max_seq_length
    layer = tokens * layer_bytes(config, training)
    kept = tokens * size * 2 * config.hidden_size if training.grad_checkpoint else layer
    layers = config.num_hidden_layers * kept + (layer if training.grad_checkpoint else 0)
    softmax = tokens * _softmax_bytes(config, training)
    # Measured: gradients of one layer's inner activations wait for the last one's, since MLX computes ahead.
    gradients = _LAYERS_AHEAD * layer if training.grad_checkpoint else config.num_hidden_layers * (layer - softmax)
    parts = training.parts
    shared = (_LOGITS_AT_ONCE, _TRANSIENT_AT_ONCE, _GRADIENTS_AT_ONCE)
    logits_at_once, transient_at_once, gradients_at_once = shared if parts > 1 else (1, 1, 1)
    return TrainingMemory(
        weights=4 * count,
        compute_copy=0 if training.dtype == "float32" else size * count,
        optimizer=optimizer_bytes(config, training.optimizer),
        ema=4 * count if training.ema_decay else 0,
        gradients=4 * count * parts * (2 if parts > 1 and training.grad_accumulation_steps > 1 else 1),
        # With accumulation beside the sum so far, which is whole.
        first_gradients=round(4 * count * parts * (gradients_at_once + (training.grad_accumulation_steps > 1))),
        layer=layer,
        activations=layers + tokens * size * 2 * config.hidden_size,
        logits=round(logits_at_once * logits_bytes(config, training)),
        transient=round(transient_at_once * (gradients + _block_bytes(config, training))),
        update_transient=(3 if parts == 1 else 1) * 4 * count,  # a part's gradients make room for their sum
    )


def layer_bytes(config: ModelConfig, training: Training) -> int:
    """Activations that one layer keeps for each token until its gradient is taken.

    The stream and its norm before either sublayer; queries, keys, values and attention's result; what the softmax
    leaves; gate, up and their product.
    """
    size, hidden = DTYPES[training.dtype], config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = (3 if config.mlp_gated else 2) * config.intermediate_size
    norms = 6 if config.norm_placement == "both" else 4
    numbers = norms * hidden + 2 * queries + 2 * keys + inner
    return size * numbers + _softmax_bytes(config, training)


def _softmax_bytes(config: ModelConfig, training: Training) -> int:
    """Of one token in the mean over layers: its row of probabilities, or its log-sum-exp."""
    heads = config.num_attention_heads
    if training.path(config) != "plain":
        return 4 * heads
    return round(DTYPES[training.dtype] * heads * training.keys_computed(config))


def _block_bytes(config: ModelConfig, training: Training) -> int:
    """Of the scores that blockwise attention has at a time."""
    if training.path(config) != "blockwise":
        return 0
    heads, length = config.num_attention_heads, training.max_seq_length
    windows = set(map(config.window, range(config.num_hidden_layers)))
    rows = {window: training.block_rows(heads, window) for window in windows}
    block = max(n * min(length, n + (window or length) - 1) for window, n in rows.items())
    part = -(-training.batch_size // training.parts)
    return training.parts * _SCORES_AT_A_TIME * 4 * heads * part * block


def logits_bytes(config: ModelConfig, training: Training) -> int:
    """The head's results at the loss, in float32: logits, their exponentials, the probabilities; with chunks those of
    one chunk, and the gradients of the hidden states and of the head, which are made beside the loss."""
    rows, chunk = training.batch_size * training.max_seq_length, training.loss_rows(config.vocab_size)
    logits = 4 * 3 * chunk * config.vocab_size * training.parts
    if chunk * training.parts >= rows:
        return logits
    return logits + 4 * config.hidden_size * (rows + config.vocab_size * training.parts)


def optimizer_bytes(config: ModelConfig, optimizer: str) -> int:
    """Return the bytes of an optimizer's state, in float32."""
    return 4 * OPTIMIZERS[optimizer].state_size(config)
