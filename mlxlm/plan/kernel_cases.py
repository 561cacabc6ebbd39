"""What a model asks its kernels for, in training and in generation: found by tracing it, which computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.cache import KVOptions, make_cache
from mlxlm.config import ModelConfig
from mlxlm.kernels.attention_dispatch import LENGTHS
from mlxlm.kernels.dispatch import Case, Operation, record_cases
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

_CHUNK = 512  # tokens of a prompt that are read at a time, as in mlxlm.generation.context


def cases_of(config: ModelConfig, dtype: str, training_dtype: str) -> list[tuple[Operation, Case]]:
    """The operations of a model with their cases, at the lengths that are told apart: generation from weights in
    `dtype`, one text at a time and several, with whole and quantized caches; evaluation in it; and training with
    activations in `training_dtype`, with and without a document mask."""
    least, most = LENGTHS
    longest = config.max_position_embeddings
    lengths = [n for n in (least << i for i in range((most // least).bit_length())) if n < longest]
    lengths += [longest] if longest <= most else []
    cases: dict[Case, Operation] = {}
    generating = _model(config, dtype).eval()
    for n in lengths:
        cases |= generation_cases(generating, n)
        for bits in (8, 4):
            with suppress(GenerationError):  # head dims that can't be quantized
                cases |= generation_cases(generating, n, KVOptions.of(bits=str(bits)))
        cases |= generation_cases(generating, n, pads=(1, 0))
        cases |= _traced(lambda n=n: generating.model(mx.zeros((1, n), mx.int32)))
    training = _model(config, training_dtype).train()
    for n in lengths:
        for rows in (1, max(1, 1024 // n)):
            for document_mask in (False, True):
                cases |= training_cases(training, rows, n, document_mask)
    return [(operation, case) for case, operation in cases.items()]


def generation_cases(
    model: Decoder, length: int, kv: KVOptions | None = None, pads: tuple[int, ...] = (0,)
) -> dict[Case, Operation]:
    """Of reading `length` - 1 tokens of a prompt in chunks and decoding one more; `pads`: padding before each row."""

    def run() -> None:
        caches = make_cache(model, kv or KVOptions())
        if any(pads):
            for cache in caches:
                cache.set_left_padding(pads)
        sizes = [min(_CHUNK, length - 1 - start) for start in range(0, length - 1, _CHUNK)]
        for size in (*sizes, 1):
            model(mx.zeros((len(pads), size), mx.int32), cache=caches)

    return _traced(run)


def training_cases(model: Decoder, rows: int, length: int, document_mask: bool) -> dict[Case, Operation]:
    """Of the forward pass of a step on `rows` sequences; its gradient asks for nothing more."""
    tokens = mx.zeros((rows, length), mx.int32)
    return _traced(lambda: model.model(tokens, segment_ids=tokens if document_mask else None))


def _traced(run: Callable[[], object]) -> dict[Case, Operation]:
    with record_cases() as cases:
        run()
    return cases


def _model(config: ModelConfig, dtype: str) -> Decoder:
    """One whose weights are never computed."""
    model = Decoder(config)
    model.update(tree_map(lambda weight: weight.astype(getattr(mx, dtype)), model.trainable_parameters()))
    return model
