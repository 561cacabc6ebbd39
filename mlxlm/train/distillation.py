"""Learning from a teacher, and with quantized weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mlxlm.backend.mlx import eval_arrays, mx, tree_flatten, tree_unflatten
from mlxlm.checkpoint import open_decoder_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import Format, compatible_format, module_quantization
from mlxlm.data import TokenDataset
from mlxlm.data.batches import validation_batches
from mlxlm.families import quantizable_modules
from mlxlm.kernels import Distillation, LinearLogits, linear_distillation_loss
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.base_model import load_base
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import Loss, LossSums, mean_loss
from mlxlm.utils.errors import ConfigError


def distillation_loss(settings: TrainSettings, training: bool = True) -> Loss:
    """Return the loss of a run with a teacher; without `training` to measure it. It has both of its parts as metrics.

    Raises:
        ConfigError: The teacher has a shorter context than the rows.
    """
    assert settings.teacher is not None  # for type checkers
    teacher = load_teacher(settings.teacher, settings.dtype)
    _check_context(teacher.config, settings)
    distillation = Distillation(settings.kd_ratio, settings.kd_temperature, settings.teacher_top_k)

    def loss(
        model: Decoder, tokens: mx.array, segment_ids: mx.array | None = None, loss_weights: mx.array | None = None
    ) -> LossSums:
        inputs, vocab_size = tokens[:, :-1], model.config.vocab_size
        student, taught = (linear_logits(m, inputs, segment_ids, vocab_size) for m in (model, teacher))
        weights = mx.ones(tokens[:, 1:].size) if loss_weights is None else loss_weights.flatten()
        total, cross_entropy, kl = linear_distillation_loss(
            student, taught, tokens[:, 1:].flatten(), weights, distillation, training=training
        )
        count = weights.sum()
        divisor = mx.maximum(count, 1e-9)
        metrics = {"cross_entropy": mx.stack([cross_entropy, divisor]), "kl": mx.stack([kl, divisor])}
        return total, count, metrics

    return loss


def evaluate_distillation(
    model: Decoder,
    data: TokenDataset,
    loss: Loss,
    max_seq_length: int,
    batch_size: int,
    max_tokens: int,
    **masks: bool,
) -> tuple[float, float, float, dict[str, float]]:
    """Measure a `distillation_loss`; see `mlxlm.evaluate.evaluate_dataset` for the arguments.

    Returns:
        The loss; the cross-entropy in nats per token and in bits per byte; and the metrics of the loss.
    """
    batches = validation_batches(data, batch_size, max_seq_length, max_tokens, **masks)
    mean, metrics = mean_loss(model, loss, batches)
    tokens = data.num_targets() if masks.get("mask_prompt") else len(data)
    bits_per_byte = metrics["cross_entropy"] / math.log(2) * tokens / data.bytes
    return mean, metrics["cross_entropy"], bits_per_byte, metrics


def linear_logits(model: Decoder, tokens: mx.array, segment_ids: mx.array | None, vocab_size: int) -> LinearLogits:
    """Return the logits of the first `vocab_size` tokens: some models pad their vocabulary more than others."""
    hidden, bias = model.model(tokens, segment_ids=segment_ids), model.head_bias
    weight, bias = model.head_weight[:vocab_size], None if bias is None else bias[:vocab_size]
    return LinearLogits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, model.final_logit_softcap)


@lru_cache(maxsize=1)  # a run is benchmarked with it first, then trained
def load_teacher(model: str, dtype: str) -> Decoder:
    """Load a model in evaluation mode, dequantized, with weights of `dtype`; see `open_checkpoint`."""
    checkpoint = open_decoder_checkpoint(model, "a teacher")
    teacher = load_base(checkpoint, checkpoint.config.with_changes(quantization=None), dtype)
    teacher.eval()
    eval_arrays(teacher.parameters())
    return teacher


@lru_cache(maxsize=1)
def teacher_bytes(model: str, dtype: str) -> int:
    """Return the memory of a teacher."""
    parameters = open_decoder_checkpoint(model, "a teacher").config.parameter_count()
    return parameters * getattr(mx, dtype).size


def check_teacher(values: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ConfigError if the teacher of the settings `values` can't teach a model with this tokenizer.

    The teacher may have rows of its embeddings that are no tokens, but not fewer than `vocab_size`.
    """
    if (teacher := values.get("teacher")) is None:
        return
    checkpoint = open_decoder_checkpoint(teacher, "a teacher")
    if checkpoint.load_tokenizer().vocabulary != tokenizer.vocabulary:
        raise ConfigError(f"the teacher {teacher} has another vocabulary", "a teacher with the same tokenizer")
    if checkpoint.config.vocab_size < vocab_size:
        problem = f"the teacher {teacher} has logits for {checkpoint.config.vocab_size} tokens, the model {vocab_size}"
        raise ConfigError(problem, "a teacher with as many")
    _check_context(checkpoint.config, TrainSettings.provisional(values))


def _check_context(teacher: ModelConfig, settings: TrainSettings) -> None:
    if settings.max_seq_length > teacher.max_position_embeddings:
        problem = f"sequences of {settings.max_seq_length} tokens are longer than the teacher's context"
        raise ConfigError(problem, f"`max_seq_length={teacher.max_position_embeddings}` or less")


def quantized_formats(model: Decoder, quantization: Mapping[str, Any]) -> dict[str, Format]:
    """Return the format of each quantized matrix by module, as `mlxlm quantize` writes it.

    Args:
        model: The model.
        quantization: As in config.json: `bits`, `group_size` and exceptions by module.
    """
    is_quantizable = quantizable_modules(model.config)
    formats = {}
    for name, weight in tree_flatten(model.parameters()):
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and weight.ndim >= 2 and is_quantizable(module):
            entry = module_quantization(quantization, module)
            if entry and (chosen := compatible_format(Format(**entry), weight.shape[-1])):
                formats[module] = chosen
    return formats


def loss_of_quantized(loss: Loss, quantization: Mapping[str, Any]) -> Loss:
    """Return the loss of the model with quantized weights."""

    def quantize_first(model: Decoder, **arrays: mx.array) -> LossSums:
        _quantize(model, quantization)
        return loss(model, **arrays)

    return quantize_first


def _quantize(model: Decoder, quantization: Mapping[str, Any]) -> None:
    """Round the weights of a model to quantized ones, whose gradient is that of the weights (straight-through)."""
    weights = dict(tree_flatten(model.parameters()))
    rounded = []
    for module, chosen in quantized_formats(model, quantization).items():
        weight = weights[f"{module}.weight"]
        packed, *scales = mx.quantize(
            weight.astype(mx.float16), **chosen.to_dict()
        )  # as `mlxlm quantize`, from 16 bits
        values = mx.dequantize(packed, *(x.astype(mx.float32) for x in scales), **chosen.to_dict())
        values = mx.stop_gradient(values.astype(weight.dtype)) + (weight - mx.stop_gradient(weight))
        rounded.append((f"{module}.weight", values))
    model.update(tree_unflatten(rounded))


@contextmanager
def quantized_weights(model: Decoder, quantization: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside the block, give the model the weights that `quantization` makes of its own; None changes nothing."""
    if quantization is None:
        yield
        return
    weights = tree_flatten(model.parameters())
    _quantize(model, quantization)
    try:
        yield
    finally:
        model.load_weights(weights)
