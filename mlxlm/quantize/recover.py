"""Recovery: train scales, biases and norms of a quantized model so that its logits are again those of its source.

The packed integers stay as they are, so that the size doesn't change. Distillation into the scales is what mlx_lm's DWQ
does, and the second phase of EfficientQAT (Chen et al. 2024, arXiv:2407.11062).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import eval_arrays, free_memory, mx, optim, tree_unflatten
from mlxlm.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import Format
from mlxlm.kernels import Distillation, linear_distillation_loss
from mlxlm.model import Decoder
from mlxlm.quantize.calibration_text import CALIBRATION_TOKENS, QuantizationTexts
from mlxlm.quantize.methods import Job, QuantizedTensors
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.quantize.rtn import PackedMatrix, dequantized
from mlxlm.quantize.source import Source
from mlxlm.train.base_model import load_base
from mlxlm.train.distillation import linear_logits
from mlxlm.utils.errors import ArgumentError, CheckpointError, DataError

BATCH_TOKENS = 2048  # of a step
STEPS = 32
WARMUP = 4  # steps
# Of Adam, in units of a group's scale. A model of 2.7M parameters after GPTQ, in steps of 1,024 tokens: with 3 bits KL
# 0.167 before, 0.080 after with 0.03, 0.065 with 0.015; with 2 bits 1.305 before, 0.291 and 0.285 after.
LEARNING_RATE = 0.015
_HELD_OUT = 8  # One in eight windows is held out, to measure the KL divergence before and after.
_KL = Distillation(kd_ratio=1.0)


def check_recovery(source: Source, texts: QuantizationTexts) -> None:
    """Check that a model can be recovered, before hours of work.

    Raises:
        ArgumentError: It runs through mlx_lm's classes.
        CheckpointError: It doesn't fit in memory.
        DataError: The calibration text has only one window: none is left to measure on.
    """
    if not isinstance(source.checkpoint, Checkpoint):
        raise ArgumentError("`recover` needs a model that mlxlm runs itself, not mlx_lm", "no `recover`")
    needed = recovery_bytes(source.checkpoint.config, source.parameters)
    if needed > 0.6 * platform.total_memory():
        problem = f"`recover` trains the whole model in float32, which takes {needed / 1e9:.3g} GB of memory"
        raise CheckpointError(problem, "method gptq without `recover`, which keeps one layer in memory")
    if len(texts.calibration_windows) < 2:
        problem = f"{texts.calibration.name} has {len(texts.calibration.tokens)} tokens, too few to recover on"
        raise DataError(problem, "a longer text")


def recovery_bytes(config: ModelConfig, parameters: int) -> int:
    """Bytes of memory that `recover` needs, without activations.

    The weights in float32 with their gradients, and packed; the source's head and last hidden states.
    """
    return 9 * parameters + 4 * (config.vocab_size + CALIBRATION_TOKENS) * config.hidden_size


def recover(job: Job, plan: QuantizationPlan, quantized: QuantizedTensors) -> QuantizedTensors:
    """Train the scales and biases of affine formats, and the norms, to the source's logits on the calibration text.

    The loss is the KL divergence of the two models' next tokens. A part of the text isn't trained on: if the KL
    divergence there isn't smaller afterwards, the model stays as it was. Memory: `recovery_bytes`, and the activations
    of one layer for `BATCH_TOKENS` tokens.

    Args:
        job: What is quantized, with calibration windows; `check_recovery` has accepted its source.
        plan: The format of each matrix.
        quantized: What to improve. All of it is read into memory.
    """
    source, windows = job.source.checkpoint_16bit, job.texts.calibration_windows
    assert isinstance(source, Checkpoint)  # for type checkers
    tensors = {name: lazy_tensor(tensor.read()) for name, tensor in quantized.tensors.items()}
    eval_arrays([tensor.read() for tensor in tensors.values()])
    config = source.config.with_changes(quantization=None)
    targets = _Targets(source, config, windows, partial(job.progress, "running the source"))
    free_memory()
    student = load_base(source.with_tensors(tensors, plan.quantization_config()), config)
    student.model.grad_checkpoint = True
    trained = _Parameters({name: tensor.read() for name, tensor in tensors.items()}, plan.formats)
    held_out = max(1, len(windows) // _HELD_OUT)
    training, measured = np.split(np.arange(len(windows)), [-held_out])
    batch = max(1, BATCH_TOKENS // windows.shape[1])

    def loss(deltas: Mapping[str, mx.array], rows: mx.array) -> mx.array:
        student.update(tree_unflatten(list(trained.weights(deltas).items())))
        return targets.kl(student, rows)

    def measure(deltas: Mapping[str, mx.array]) -> float:
        parts = [measured[start : start + batch] for start in range(0, held_out, batch)]
        return sum(len(part) * loss(deltas, mx.array(part)).item() for part in parts) / held_out

    start = deltas = trained.zeros()
    before = measure(start)
    optimizer = optim.Adam(LEARNING_RATE, betas=[0.9, 0.95], bias_correction=True)
    step, batches = mx.value_and_grad(loss), _batches(training, batch)
    student.train()
    for done in range(STEPS):
        job.progress("recovering", done, STEPS)
        optimizer.learning_rate = LEARNING_RATE * min(1.0, (done + 1) / WARMUP) * (1 - done / STEPS)
        _, gradients = step(deltas, mx.array(next(batches)))
        deltas = optimizer.apply_gradients(gradients, deltas)
        eval_arrays([deltas, optimizer.state])
    student.eval()
    if not measure(deltas) < before:  # NaN, too
        deltas = start
    job.progress("recovering", STEPS, STEPS)
    changed = {name: lazy_tensor(value) for name, value in trained.stored(deltas).items()}
    eval_arrays([tensor.read() for tensor in changed.values()])
    free_memory()
    return replace(quantized, tensors={**tensors, **changed})


class _Targets:
    """The source's last hidden state for each token of the text, from which its head makes the logits."""

    def __init__(
        self, source: Checkpoint, config: ModelConfig, windows: np.ndarray, progress: Callable[[int, int], None]
    ):
        model = load_base(source, config)
        model.eval()
        self._tokens, hidden = mx.array(windows), []
        for done, tokens in enumerate(self._tokens, start=1):
            self._logits = linear_logits(model, tokens[None], None, config.vocab_size)
            hidden.append(self._logits.hidden)
            eval_arrays(hidden[-1])
            progress(done, len(windows))
        self._hidden = mx.stack(hidden)
        eval_arrays(self._hidden)

    def kl(self, student: Decoder, rows: mx.array) -> mx.array:
        """KL(source || student) of the windows `rows`, in nats per token."""
        tokens, hidden = self._tokens[rows], self._hidden[rows].flatten(0, 1)
        logits = linear_logits(student, tokens, None, student.config.vocab_size)
        taught = replace(self._logits, hidden=hidden)
        total, *_ = linear_distillation_loss(logits, taught, tokens.flatten(), None, _KL, training=True)
        return total / tokens.size


class _Parameters:
    """The trained parameters, as changes of values: each starts at 0, and 1 is a change of about the same importance.

    For a scale and a bias that is a group's scale: the bias moves all weights of the group by it, and the scale those
    at the ends of its range, in opposite directions. For norms it is the mean magnitude of their weights.

    Args:
        values: All tensors of the quantized model.
        formats: The format of each module.
    """

    def __init__(self, values: Mapping[str, mx.array], formats: Mapping[str, Format | None]):
        self._packed = {
            module: (PackedMatrix(*(values[f"{module}.{part}"] for part in PackedMatrix._fields)), fmt)
            for module, fmt in formats.items()
            if fmt is not None and fmt.affine
        }
        self._norms = {name: value for name, value in values.items() if name.endswith("norm.weight")}
        self._dtypes = {name: value.dtype for name, value in values.items()}

    def zeros(self) -> dict[str, mx.array]:
        """The changes to start with."""
        shapes = {name: value.shape for name, value in self._norms.items()}
        for module, (packed, _) in self._packed.items():
            shapes |= dict.fromkeys((f"{module}.scales", f"{module}.biases"), packed.scales.shape)
        return {name: mx.zeros(shape) for name, shape in shapes.items()}

    def values(self, deltas: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Scales, biases and norms with these changes, rounded to their dtypes, in float32.

        The rounding passes gradients on as they are.
        """
        changed = {}
        for name, norm in self._norms.items():
            changed[name] = as_float32(norm) + mx.abs(as_float32(norm)).mean() * deltas[name]
        for module, (packed, fmt) in self._packed.items():
            scales, biases = f"{module}.scales", f"{module}.biases"
            unit, half = mx.abs(as_float32(packed.scales)), (2**fmt.bits - 1) / 2
            change = unit / half * deltas[scales]
            changed[scales] = as_float32(packed.scales) + change
            changed[biases] = as_float32(packed.biases) + unit * deltas[biases] - half * change
        return {name: value + mx.stop_gradient(self._rounded(name, value) - value) for name, value in changed.items()}

    def stored(self, deltas: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The same in their dtypes, as they are written."""
        return {name: value.astype(self._dtypes[name]) for name, value in self.values(deltas).items()}

    def weights(self, deltas: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weights of norms and matrices with these changes, dequantized, in float32."""
        values = self.values(deltas)
        weights = {name: values[name] for name in self._norms}
        for module, (packed, fmt) in self._packed.items():
            changed = PackedMatrix(packed.weight, values[f"{module}.scales"], values[f"{module}.biases"])
            weights[f"{module}.weight"] = dequantized(changed, fmt)
        return weights

    def _rounded(self, name: str, value: mx.array) -> mx.array:
        return value.astype(self._dtypes[name]).astype(mx.float32)


def _batches(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield `size` of the rows at a time, forever, in another order each time that all were used."""
    rng, left = np.random.default_rng(0), np.zeros(0, rows.dtype)
    while True:
        while len(left) < size:
            left = np.concatenate([left, rng.permutation(rows)])
        yield left[:size]
        left = left[size:]
