"""The texts of a request: submitted to the engine, and merged into one stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic

from mlxlm.generation import GenerationChunk, GenerationOptions, GenerationResult, QueueFullError, Request, TextStream
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.server.errors import ApiError, client_message, invalid
from mlxlm.server.events import comment
from mlxlm.server.metrics import Metrics
from mlxlm.server.models import ServedModel
from mlxlm.server.schemas import option_in
from mlxlm.utils.errors import GenerationError

KEEP_ALIVE_SECONDS = 1.0  # after so long without a chunk, a stream gets a comment
_QUEUE_SIZE = 64  # chunks; further ones wait in their TextStream, which pauses generation if there are too many


def sample_requests(
    prompts: Sequence[Sequence[int]], options: GenerationOptions, eos_token_ids: frozenset[int], n: int
) -> list[Request]:
    """`n` requests for each prompt, with a different seed each. A single request keeps the seed of the options."""
    if options.seed is None:
        options = options.with_seed(random_seed())
    requests = [Request(prompt, options, eos_token_ids) for prompt in prompts]
    if len(prompts) * n == 1:
        return requests
    return [request.sample(str(number), k) for number, request in enumerate(requests, 1) for k in range(n)]


class Texts:
    """Texts that are being generated.

    Attributes:
        streams: One for each text.
        prompt_tokens: Tokens of all prompts.
    """

    def __init__(self, model: ServedModel, streams: Sequence[TextStream], prompt_tokens: int, metrics: Metrics):
        self.streams = streams
        self._model, self.prompt_tokens, self._metrics = model, prompt_tokens, metrics

    async def chunks(self) -> AsyncGenerator[tuple[int, GenerationChunk] | None]:
        """Yield (index of a text, its next chunk), or None after `KEEP_ALIVE_SECONDS` without a chunk."""
        start, first = monotonic(), True
        async for item in _merge(self.streams, KEEP_ALIVE_SECONDS):
            if item is not None and first:
                first = False
                self._metrics.first_token.labels(self._model.name).observe(monotonic() - start)
            yield item

    def progress(self) -> bytes:
        """A comment on the progress, for a stream without chunks."""
        read = sum(stream.num_read for stream in self.streams)
        if read < self.prompt_tokens:
            return comment(f"reading the prompt, {read} of {self.prompt_tokens} tokens")
        return comment("generating")

    async def results(self) -> list[GenerationResult]:
        """Wait for the results of all texts."""
        return [await stream.wait() for stream in self.streams]


@asynccontextmanager
async def generate(model: ServedModel, requests: Sequence[Request], metrics: Metrics) -> AsyncIterator[Texts]:
    """Generate texts. At the end of the block, unfinished ones are cancelled.

    Raises:
        ApiError: 400 for a prompt or options that the model can't serve, 429 if too many texts wait already.
    """
    if len(requests) > (most := model.settings.max_waiting):
        raise invalid(f"the request is for {len(requests)} texts, and at most {most} may wait (try: fewer)")
    streams: list[TextStream] = []
    try:
        for request in requests:
            streams.append(_submit(model, request))  # noqa: PERF401 - so that it is cancelled if the next one fails
        yield Texts(model, streams, sum(len(request.prompt) for request in requests), metrics)
    finally:
        for stream in streams:
            stream.cancel()
        for stream in streams:
            with suppress(Exception):  # the error of a text, which its reader has raised
                metrics.add_result(model.name, stream.result())


def _submit(model: ServedModel, request: Request) -> TextStream:
    try:
        return model.engine.submit(request)
    except QueueFullError as error:
        raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "2"}) from None
    except GenerationError as error:
        too_long = len(request.prompt) >= model.context_length
        code = "context_length_exceeded" if too_long else None
        raise invalid(client_message(error), option_in(error.message), code) from None


async def _merge(streams: Sequence[TextStream], seconds: float) -> AsyncGenerator[tuple[int, GenerationChunk] | None]:
    """Yield (index, chunk) of all streams as they come, and None after `seconds` without any. Raise their errors."""
    # A None in the queue is the end of a stream.
    queue: asyncio.Queue[tuple[int, GenerationChunk] | Exception | None] = asyncio.Queue(_QUEUE_SIZE)

    async def read(number: int, stream: TextStream) -> None:
        try:
            async for chunk in stream:
                await queue.put((number, chunk))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            try:
                async with asyncio.timeout(seconds):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
