"""The kernel cases of a model in training and generation, found by tracing it without computing anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.cache import PREFILL_STEP_SIZE, KVCache, KVOptions, make_cache
from mlxlm.config import ModelConfig
from mlxlm.kernels import kth_smallest, weighted_quantile
from mlxlm.kernels.attention import LENGTHS
from mlxlm.kernels.dispatch import Case, Operation, record_cases
from mlxlm.model import Decoder
from mlxlm.model.attention import Attention
from mlxlm.utils.errors import GenerationError


def cases_of(config: ModelConfig, dtype: str, training_dtype: str) -> list[tuple[Operation, Case]]:
    """List the operations of a model and their cases, at the lengths that dispatch distinguishes.

    Args:
        config: The model.
        dtype: Of weights in generation (single sequences and batches, float and quantized caches) and evaluation.
        training_dtype: Of activations in training, with and without a document mask.
    """
    shortest, longest = LENGTHS
    context = config.max_position_embeddings
    lengths = [n for n in (shortest << i for i in range((longest // shortest).bit_length())) if n < context]
    lengths += [context] if context <= longest else []
    cases: dict[Case, Operation] = {}
    generating = _model(config, dtype).eval()
    for n in lengths:
        cases |= generation_cases(generating, n)
        for bits in (8, 4):
            with suppress(GenerationError):  # head dims that can't be quantized
                cases |= generation_cases(generating, n, KVOptions.of(bits=str(bits)))
        cases |= generation_cases(generating, n, pads=(1, 0))
        cases |= _traced(partial(generating.model, mx.zeros((1, n), mx.int32)))
    cases |= _traced(partial(_sampler_thresholds, config.vocab_size))
    training = _model(config, training_dtype).train()
    for n in lengths:
        for rows in (1, max(1, 1024 // n)):
            for document_mask in (False, True):
                cases |= training_cases(training, rows, n, document_mask)
    return [(operation, case) for case, operation in cases.items()]


def generation_cases(
    model: Decoder, length: int, kv: KVOptions | None = None, pads: tuple[int, ...] = (0,)
) -> dict[Case, Operation]:
    """Trace the prefill of `length` - 1 tokens in chunks and one decoding step, with and without fused projections.

    `pads` is the left padding of each row.
    """

    def run() -> None:
        caches = make_cache(model, kv or KVOptions())
        if any(pads):
            for cache in caches:
                cache.set_left_padding(pads)
        sizes = [min(PREFILL_STEP_SIZE, length - 1 - start) for start in range(0, length - 1, PREFILL_STEP_SIZE)]
        for size in (*sizes, 1):
            model(mx.zeros((len(pads), size), mx.int32), cache=caches)
        dtype = next(cache.buffers[0].dtype for cache in caches if isinstance(cache, KVCache))
        for attention in (layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)):
            projected = mx.zeros((len(pads), sum(attention.projected_heads) * attention.head_dim), dtype)
            attention.split_and_rotate(projected, angles=mx.zeros((len(pads),), mx.int32))

    return _traced(run)


def _sampler_thresholds(vocab_size: int) -> None:
    """The operations of top-k and top-p."""
    logits = mx.zeros((1, vocab_size))
    kth_smallest(logits, 1)
    weighted_quantile(logits, logits.astype(mx.uint32), 1.0)


def training_cases(model: Decoder, rows: int, length: int, document_mask: bool) -> dict[Case, Operation]:
    """Trace the forward pass of a training step on `rows` sequences. The gradient adds no cases."""
    tokens = mx.zeros((rows, length), mx.int32)
    return _traced(partial(model.model, tokens, segment_ids=tokens if document_mask else None))


def _traced(run: Callable[[], object]) -> dict[Case, Operation]:
    with record_cases() as cases:
        run()
    return cases


def _model(config: ModelConfig, dtype: str) -> Decoder:
    """Build the model lazily: its weights are never evaluated."""
    model = Decoder(config)
    model.update(tree_map(lambda weight: weight.astype(getattr(mx, dtype)), model.trainable_parameters()))
    return model
