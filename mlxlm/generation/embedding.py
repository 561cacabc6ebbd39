"""Embeddings of texts, and hidden states."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.config.numbers import is_int_at_least
from mlxlm.generation import device_thread
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel, loaded
from mlxlm.generation.request import encode_prompt
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

_BATCH_TOKENS = 4 * PREFILL_STEP_SIZE  # of one pass, padding included


def embed(
    lm: LoadedModel | str | Path,
    texts: str | Iterable[str | Sequence[int]],
    *,
    prompt_name: str | None = None,
    dimensions: int | None = None,
) -> np.ndarray:
    """Return the embeddings of texts: vectors of length 1, whose product is the cosine similarity.

    Embedding models such as Qwen3-Embedding are recognized by the files of sentence-transformers, or the pooling type
    in a GGUF file. For any other model, an embedding is the mean of the hidden states after the final norm: such a
    model isn't trained for this, and its embeddings compare texts, but worse.

    Args:
        lm: The model, or its name, path or hub id; see `mlxlm.load`.
        texts: Texts, or token ids, which are used unchanged. The tokenizer's special tokens are added to texts.
        prompt_name: The name of a prompt of the model that is put before each text, such as "query". Models that are
            made for search have one for queries and none for documents. By default, that of the model, if it has one.
        dimensions: Keep only the first values of each vector (Kusupati et al. 2022, "Matryoshka Representation
            Learning"). By default, all.

    Returns:
        float32 `[N, dimensions]`; `[dimensions]` for a single text.

    Raises:
        GenerationError: For an empty text, one that is longer than the model's context, an unknown prompt, and a model
            that can't embed.
    """
    lm = loaded(lm)
    if isinstance(texts, str):
        return embed(lm, [texts], prompt_name=prompt_name, dimensions=dimensions)[0]
    if not isinstance(texts, Iterable):
        raise GenerationError("texts is not a list of texts", '["a cat", "a dog"]')
    encoded = []
    for number, text in enumerate(texts, 1):
        try:
            encoded.append(encode_for_embedding(lm, text, prompt_name))
        except GenerationError as error:
            raise error.prefixed(f"text {number}") from None
    vectors: list[np.ndarray] = [np.empty(0)] * len(encoded)
    for rows, batch in similar_lengths(lm, encoded):
        for row, vector in zip(rows, device_thread.run(partial(embed_batch, lm, batch, dimensions)), strict=True):
            vectors[row] = vector
    return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)


def encode_for_embedding(
    lm: LoadedModel, text: str | Sequence[int], prompt_name: str | None = None, max_length: int = sys.maxsize
) -> Sequence[int]:
    """Return the ids of a text to embed, after a prompt of the model; see `embed` and `Tokenizer.encode`."""
    config = lm.embedding
    name = config.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in config.prompts:
        hint = f"one of {', '.join(config.prompts)}" if config.prompts else "a text that starts with the prompt"
        raise GenerationError(f"this model has no prompt {name!r}", hint)
    if not isinstance(text, str):
        ids = encode_prompt(lm, text)
    elif not text:
        raise GenerationError("the text is empty", "one character or more")
    else:
        prefix = "" if name is None else config.prompts[name]
        ids = lm.tokenizer.encode(prefix + text, max_length=max_length)
    limit, vocab_size = lm.config.max_position_embeddings, lm.config.vocab_size
    if not 0 < len(ids) <= limit:
        raise GenerationError(f"the text has {len(ids)} tokens, and the model embeds 1 to {limit}", "parts of it")
    if not all(0 <= id < vocab_size for id in ids):
        raise GenerationError("the text has ids that this model doesn't have", f"ids from 0 to {vocab_size - 1}")
    return ids


def similar_lengths(
    lm: LoadedModel, encoded: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], list[Sequence[int]]]]:
    """Yield the numbers and ids of texts that are embedded in one pass: of similar lengths, so with little padding."""
    batch: list[int] = []
    for row in sorted(range(len(encoded)), key=lambda row: len(encoded[row])):
        if batch and (not lm.supports_batching or len(encoded[row]) * (len(batch) + 1) > _BATCH_TOKENS):
            yield batch, [encoded[i] for i in batch]
            batch = []
        batch.append(row)
    if batch:
        yield batch, [encoded[i] for i in batch]


def embed_batch(lm: LoadedModel, encoded: Sequence[Sequence[int]], dimensions: int | None = None) -> np.ndarray:
    """Embed texts, from `encode_for_embedding`, in one pass: float32 `[N, dimensions]`.

    Raises:
        GenerationError: For invalid dimensions, and a model that can't embed.
    """
    lm.check_whole("embeddings")
    if lm.embedding.unsupported is not None:
        problem = f"the embeddings of this model need {lm.embedding.unsupported}, which mlxlm doesn't have"
        raise GenerationError(problem, "an embedding model with the pooling lasttoken or mean, such as Qwen3-Embedding")
    if not hasattr(lm.model, "model"):
        raise GenerationError("this model has no embeddings: its hidden states can't be read", "a Llama-like model")
    pooled = _pool(lm, encoded)
    size = pooled.shape[1]
    if dimensions is not None and (not is_int_at_least(dimensions, 1) or dimensions > size):
        problem = f"dimensions is {dimensions!r}, and the embeddings of this model have {size}"
        raise GenerationError(problem, f"1 to {size}")
    pooled = pooled[:, :dimensions]
    return np.array(pooled / mx.maximum(mx.linalg.norm(pooled, axis=1, keepdims=True), 1e-12))


def _pool(lm: LoadedModel, encoded: Sequence[Sequence[int]]) -> mx.array:
    """Sum the hidden states of each text, or take the last: `[N, hidden]`, float32. No token sees padding after it."""
    lengths = np.array([len(ids) for ids in encoded])[:, None]
    positions = np.arange(lengths.max())
    tokens = np.zeros((len(encoded), len(positions)), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
    is_pooled = positions == lengths - 1 if lm.embedding.pooling == "last" else positions < lengths
    context = Context(lm.model)
    context.trim_to_prefix(max(encoded, key=len))  # tells the caches how long the text is
    pooled = mx.zeros(1)
    for start in range(0, len(positions), PREFILL_STEP_SIZE):
        part = slice(start, start + PREFILL_STEP_SIZE)
        hidden = lm.model.model(mx.array(tokens[:, part]), cache=context.caches).astype(mx.float32)
        pooled = pooled + mx.where(mx.array(is_pooled[:, part, None]), hidden, 0).sum(axis=1)
        eval_caches(context.caches, pooled)
    return pooled


def hidden_states(lm: LoadedModel | str | Path, text: str | Sequence[int]) -> np.ndarray:
    """Return the hidden states of a text, for each of its tokens.

    Args:
        lm: The model, or its name, path or hub id; see `mlxlm.load`.
        text: A text, or token ids, which are used unchanged.

    Returns:
        float32 `[L + 1, T, hidden]` for L layers: the embedding of each token, then the residual after each layer; the
        last of them is after the final norm, as in transformers.

    Raises:
        GenerationError: For an empty text, one that is longer than the model's context, and a model that mlx_lm runs.
    """
    lm = loaded(lm)
    lm.check_whole("hidden states")
    model = lm.model
    if not isinstance(model, Decoder):
        raise GenerationError("mlxlm can't read the hidden states of this architecture", "a Llama-like model")
    tokens = mx.array([encode_for_embedding(lm, text)])

    def compute() -> np.ndarray:
        states = []
        for residual, added in model.model.layer_states(tokens):
            states.append(residual if added is None else residual + added)
        states[-1] = model.model.final_norm(residual, added)
        return np.array(mx.concatenate(states).astype(mx.float32))

    return device_thread.run(compute)
