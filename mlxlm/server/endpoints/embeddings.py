"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlxlm.generation import device_thread
from mlxlm.generation.embedding import embed_batch, encode_for_embedding, similar_lengths
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import client_message, invalid
from mlxlm.server.models import Models, ServedModel
from mlxlm.server.reply import json_response
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import Fields, Prompts
from mlxlm.utils.errors import GenerationError


class EmbeddingRequest(Fields):
    """The body of /v1/embeddings.

    Attributes:
        dimensions: How many of the first values of each vector to keep.
    """

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


async def embeddings(request: Request) -> Response:
    """Return an embedding of each text, a vector of length 1."""
    body = await read_body(request, EmbeddingRequest)
    return await json_response(request, _embed(request.app.state.models, body))


async def _embed(models: Models, body: EmbeddingRequest) -> dict[str, Any]:
    async with models.use(body.model) as model:
        vectors, num_tokens = await embed_texts(model, body.input, body.dimensions, "input")
        encode = _to_base64 if body.encoding_format == "base64" else list[float]
        data = [{"object": "embedding", "index": n, "embedding": encode(vector)} for n, vector in enumerate(vectors)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}


async def embed_texts(
    model: ServedModel, texts: Sequence[Any], dimensions: int | None, param: str
) -> tuple[list[list[float]], int]:
    """The embeddings of texts or token ids, and the number of their tokens.

    Args:
        model: The model.
        texts: The texts.
        dimensions: See `EmbeddingRequest`.
        param: The field with the texts, for errors.

    Raises:
        ApiError: For an empty text, one that is too long, and dimensions that the model doesn't have.
    """
    lm, encoded = model.lm, []
    for index, text in enumerate(texts):
        try:
            encoded.append(await model.encode(encode_for_embedding, lm, text))
        except GenerationError as error:
            raise invalid(client_message(error), f"{param}.{index}") from None
    vectors: list[list[float]] = [[]] * len(encoded)
    # A few texts at a time, so that requests for text needn't wait for all of them.
    for rows, batch in similar_lengths(lm, encoded):
        embed = partial(device_thread.run, partial(embed_batch, lm, batch, dimensions))
        try:
            found = await asyncio.to_thread(embed)
        except GenerationError as error:
            raise invalid(client_message(error), "dimensions" if "dimensions" in error.message else None) from None
        for row, vector in zip(rows, found.tolist(), strict=True):
            vectors[row] = vector
    return vectors, sum(map(len, encoded))


def _to_base64(vector: list[float]) -> str:
    """Encode as little-endian float32, in base64."""
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()


ROUTES = routes("/embeddings", embeddings)
