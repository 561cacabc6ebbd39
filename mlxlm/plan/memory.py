"""Memory of mlxlm's training step.

A step has two maxima: in the backward pass, when the activations exist and gradients are being computed, and in the
optimizer update, when all gradients exist. The larger is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.config import ModelConfig
from mlxlm.config.counts import attention_windows, layer_activations, sublayers
from mlxlm.config.optimizers import optimizer_bytes
from mlxlm.plan.training import DTYPES, THIS_DEVICE, Training, updated_at_once

# Fitted to MLX's peaks over the first four steps of a fresh process, over the presets from 0.3m to 50m and lengths from
# 128 to 1,024 on a CPU of two cores, in float32.
_LAYERS_AHEAD = 1  # layers whose gradients wait, with gradient checkpointing
_RECOMPUTED_AT_ONCE = 0.5  # of the cores' recomputed layers, which are rarely all complete
_SCORES_AT_A_TIME = 4  # arrays of the size of a block's scores
# Where cores share a batch: their graphs are evaluated piece by piece, so gradients of activations, and even more those
# of weights, are made after others were freed. That logits count twice is fitted, not explained.
_TRANSIENT_AT_ONCE, _GRADIENTS_AT_ONCE, _LOGITS_AT_ONCE = 0.6, 0.1, 2.0
_UPDATE_BYTES = {"adamw": 4, "muon": 12, "lion": 5, "adafactor": 12}
_UPDATE_BYTES_LOW_PRECISION = 18


@dataclass(frozen=True)
class TrainingMemory:
    """Memory of a training step, in bytes.

    `total` is an estimate. For the presets from 0.3m to 50m in float32 on two CPU cores, with vocabularies of up to
    32,000 tokens, gradient checkpointing, EMA and Muon, to which the constants were fitted, it was within 9 % of the
    measured peak; with gradient accumulation (15m and 50m) within 7 %. On one core a large model with few tokens takes
    up to a fifth less. It has not been compared on other devices.

    Attributes:
        weights: Weights.
        compute_copy: Weights in the compute dtype, if that is another one.
        optimizer: The optimizer's state.
        ema: The averaged weights.
        gradients: Gradients of all parameters, for each worker; with gradient accumulation also the last ones.
        first_gradients: Gradients that exist while the activations do.
        layer: Activations that one layer keeps for its gradient.
        activations: Activations of all layers, of the embedding and the head.
        logits: Logits and what the loss makes of them.
        transient: Gradients of activations.
        update_transient: Intermediate results of the update, of some parameters at a time.
    """

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
        """Bytes that stay from step to step."""
        return self.weights + self.optimizer + self.ema

    @property
    def backward(self) -> int:
        """Peak of the backward pass."""
        return self.states + self.compute_copy + self.first_gradients + self.activations + self.logits + self.transient

    @property
    def update(self) -> int:
        """Peak of the optimizer update."""
        return self.states + self.gradients + self.update_transient

    @property
    def total(self) -> int:
        """Peak of the step."""
        return max(self.backward, self.update)

    def breakdown(self) -> dict[str, int]:
        """Return what the peak consists of, by name, without empty parts."""
        peak = {"weights": self.weights, "optimizer": self.optimizer, "averaged weights": self.ema}
        if self.update > self.backward:
            peak["gradients"] = self.gradients
            peak["intermediate results of the update"] = self.update_transient
        else:
            peak |= {
                "gradients": self.first_gradients,
                "weights in the compute dtype": self.compute_copy,
                "activations": self.activations,
                "logits": self.logits,
                "gradients of activations": self.transient,
            }
        return {name: size for name, size in peak.items() if size}


def training_memory(config: ModelConfig, training: Training) -> TrainingMemory:
    """Estimate the memory of a step of `mlxlm pretrain`."""
    count, size = config.parameter_count(), DTYPES[training.dtype]
    tokens = training.batch_size * training.max_seq_length
    layer = tokens * layer_bytes(config, training)
    # With gradient checkpointing, its input, and its per-layer input: looked up, projected, normalized, and the sum.
    own_input = 4 * (config.hidden_size_per_layer_input or 0)
    kept = tokens * size * (2 * config.hidden_size + own_input) if training.grad_checkpoint else layer
    workers = training.num_workers
    recomputed = (_RECOMPUTED_AT_ONCE if workers > 1 else 1) * layer if training.grad_checkpoint else 0
    softmax = tokens * _softmax_bytes(config, training)
    # Measured: gradients of one layer's inner activations wait for the last one's, since MLX computes ahead.
    gradients = _LAYERS_AHEAD * recomputed if training.grad_checkpoint else config.num_hidden_layers * (layer - softmax)
    factors = (_LOGITS_AT_ONCE, _TRANSIENT_AT_ONCE, _GRADIENTS_AT_ONCE)
    logits_factor, transient_factor, gradients_factor = factors if workers > 1 else (1, 1, 1)
    accumulates = training.grad_accumulation_steps > 1
    # Sums are float32; gradients have the dtype of the weights.
    gradient_bytes = (4 if accumulates else DTYPES[training.param_dtype]) * count * workers
    # With gradient accumulation, in addition to the sum so far, which is complete.
    first_gradients = round(gradient_bytes * (gradients_factor + accumulates))
    copy = 0 if training.dtype == training.param_dtype else size * count
    if training.param_dtype == "bfloat16":  # measured: a layer's gradients take the place of its copy
        copy = max(0, copy - first_gradients)
    return TrainingMemory(
        weights=DTYPES[training.param_dtype] * count,
        compute_copy=copy,
        optimizer=optimizer_bytes(config, training.optimizer, training.optimizer_state),
        ema=4 * count if training.ema_decay else 0,
        gradients=gradient_bytes * (2 if workers > 1 and accumulates else 1),
        first_gradients=first_gradients,
        layer=layer,
        activations=round(config.num_hidden_layers * kept + recomputed + tokens * size * 2 * config.hidden_size),
        logits=round(logits_factor * logits_bytes(config, training)),
        transient=round(transient_factor * (gradients + _block_bytes(config, training))),
        update_transient=_update_bytes(training) * _updated_at_once(config, training),
    )


def _update_bytes(training: Training) -> int:
    """Return the bytes of intermediate results per parameter that is being updated. Measured."""
    if training.optimizer_state != "float32" or training.param_dtype != "float32":
        return _UPDATE_BYTES_LOW_PRECISION
    return _UPDATE_BYTES[training.optimizer]


def _updated_at_once(config: ModelConfig, training: Training) -> int:
    """Return the parameters that are updated at a time."""
    count, device = config.parameter_count(), training.device or THIS_DEVICE
    matrices = [matrix.parameters for sublayer, _ in sublayers(config) for matrix in sublayer.matrices]
    largest = max(config.vocab_size * config.hidden_size, *matrices)
    return min(count, max(largest, updated_at_once(count, device)))


def layer_bytes(config: ModelConfig, training: Training) -> int:
    """Return the bytes of activations that a layer keeps per token until its gradient is taken.

    Those of `layer_activations`, and the softmax's result.
    """
    return DTYPES[training.dtype] * layer_activations(config) + _softmax_bytes(config, training)


def _softmax_bytes(config: ModelConfig, training: Training) -> int:
    """Return the bytes per token of what softmax keeps: the probabilities, or the log-sum-exp. A mean over layers."""
    heads = config.num_attention_heads
    if training.attention_path(config) != "plain":
        return 4 * heads
    return round(DTYPES[training.dtype] * heads * training.keys_computed(config))


def _block_bytes(config: ModelConfig, training: Training) -> int:
    """Return the bytes of scores that blockwise attention holds at a time."""
    if training.attention_path(config) != "blockwise":
        return 0
    heads, length = config.num_attention_heads, training.max_seq_length
    rows = {window: training.block_rows(heads, window) for window in attention_windows(config)}
    block = max(n * min(length, n + (window or length) - 1) for window, n in rows.items())
    part = -(-training.batch_size // training.num_workers)
    return training.num_workers * _SCORES_AT_A_TIME * 4 * heads * part * block


def logits_bytes(config: ModelConfig, training: Training) -> int:
    """Return the bytes of logits, their exponentials and the probabilities, in float32.

    With chunks, those of one chunk, and the gradients of the hidden states and of the head, which are computed with
    the loss.
    """
    rows, chunk = training.batch_size * training.max_seq_length, training.loss_rows(config.vocab_size)
    logits = 4 * 3 * chunk * config.vocab_size * training.num_workers
    if chunk * training.num_workers >= rows:
        return logits
    return logits + 4 * config.hidden_size * (rows + config.vocab_size * training.num_workers)
