"""The models of a server: loaded when first used, unloaded when another model needs the memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVOptions
from mlxlm.chat.chat_encoder import ChatEncoder, answer_eos_token_ids, chat_encoder
from mlxlm.config import ModelConfig
from mlxlm.generation import Engine, LoadedModel, device_thread, load
from mlxlm.generation.request import context_limit
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.server.errors import ApiError, invalid
from mlxlm.server.options import ModelOptions
from mlxlm.utils.errors import ConfigError, TextTooLongError
from mlxlm.utils.formatting import human_bytes, human_count

logger = logging.getLogger("mlxlm.server")

MAX_COUNTED = 1 << 17  # tokens that endpoints return or count for a model with any context
_MAX_PROMPT_TOKENS = 1 << 20  # with a rotating cache, which has no context length
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".npz", ".pth", ".pt")


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """What all models of a server share: `ModelOptions`, and what the command line made of its other options.

    Attributes:
        defaults: Fields of GenerationOptions, for what a request doesn't set; then the model's own defaults apply.
        kv: Options of the key-value caches.
        make_speculation: Returns the decoder for speculative decoding; None for no speculation.
        max_memory: Bytes that the weights and caches of all models may take together; None for the engine's
            limit.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv: KVOptions = field(default_factory=KVOptions)
    make_speculation: Callable[[], SpeculativeDecoder] | None = None


class ServedModel:
    """A loaded model with its engine and chat template.

    Attributes:
        name: The `model` of requests.
        lm: The model.
        settings: The server's settings.
        engine: Generates its texts.
        encoder: Its chat template.
        defaults: Generation options, for what a request doesn't set.
        eos_token_ids: Tokens that end an answer.
        num_bytes: Size of the weights.
    """

    def __init__(self, name: str, lm: LoadedModel, settings: ModelSettings):
        """Create the engine of a model.

        Raises:
            ConfigError: The weights leave no memory for caches.
            MlxlmError: The chat template or the settings don't fit the model.
        """
        self.name, self.lm, self.settings = name, lm, settings
        self.encoder: ChatEncoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, settings.chat_template)
        self.eos_token_ids = answer_eos_token_ids(lm, self.encoder)
        self.defaults = lm.generation_options(**{"max_tokens": None, **settings.defaults})
        self.num_bytes = lm.weight_bytes
        max_kv_bytes = None if settings.max_memory is None else settings.max_memory - self.num_bytes
        if max_kv_bytes is not None and max_kv_bytes <= 0:
            sizes = f"takes {human_bytes(self.num_bytes)}"
            if isinstance(lm.config, ModelConfig):  # which is why it takes more than its file
                count = lm.config.parameter_count()
                bits = 8 * self.num_bytes / count
                why = ", which is fast only in float32" if ON_CPU and bits > 16 else ""
                sizes += f" ({human_count(count)} parameters of {bits:.3g} bits on this device{why})"
            limit = f"--max-memory is {human_bytes(settings.max_memory or 0)}"
            raise ConfigError(f"the model {name} {sizes}, and {limit}", "a larger --max-memory, or a smaller model")
        self.engine = Engine(
            lm,
            max_kv_bytes=max_kv_bytes,
            kv=settings.kv,
            batch_size=settings.batch_size,
            max_waiting=settings.max_waiting,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            prefix_cache_dir=settings.prefix_cache_dir,
            speculation=settings.make_speculation and settings.make_speculation(),
        )

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its text."""
        length: int = self.lm.config.max_position_embeddings
        return min(length, self.settings.kv.size or length)

    async def encode(
        self, encode: Callable[..., Sequence[int]], *args: Any, count_only: bool = False, **options: Any
    ) -> Any:
        """Encode a prompt of a request in a thread, and stop early if it is far longer than the context.

        A prompt that is a bit too long is left to the engine, whose error has its length.

        Args:
            encode: Called with `max_length`, `args` and `options`.
            args: See `encode`.
            count_only: Allow `MAX_COUNTED` tokens with any context: the endpoint doesn't generate.
            options: See `encode`.

        Raises:
            ApiError: 400 for a prompt that is too long.
        """
        limit = min(context_limit(self.lm, self.settings.kv), _MAX_PROMPT_TOKENS)
        limit = max(limit, MAX_COUNTED) if count_only else limit
        try:
            return await asyncio.to_thread(encode, *args, max_length=limit, **options)
        except TextTooLongError:
            size = f"more than {limit} tokens, and this model's maximum context length is {self.context_length}"
            problem = f"the prompt is too long: {size} (try: fewer)"
            raise invalid(problem, code="context_length_exceeded") from None

    @property
    def memory(self) -> int:
        """Bytes of its weights and caches."""
        stats = self.engine.stats
        return self.num_bytes + stats.kv_bytes + stats.prefix_cache_bytes


@dataclass
class _Entry:
    """A model that requests can name.

    Attributes:
        path: Where to load it from.
        model: The model, while it is loaded.
        users: Requests that use it.
        last_used: The time when the last of them ended.
        loading: The task that loads it.
    """

    path: str
    model: ServedModel | None = None
    users: int = 0
    last_used: float = 0.0
    loading: asyncio.Task[None] | None = None


class Models:
    """The models that requests can name.

    Args:
        paths: {name: path or hub id}. The first is the one of requests that name none.
        settings: Settings of all models. If a model doesn't fit into `max_memory` with the others, idle models are
            unloaded, the least recently used first.
    """

    def __init__(self, paths: Mapping[str, str], settings: ModelSettings):
        self.settings, self.created = settings, int(time.time())
        self._entries = {name: _Entry(path) for name, path in paths.items()}
        self._load_lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """The names, in the order of the command line."""
        return list(self._entries)

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are in memory."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def find(self, name: str | None) -> str:
        """The name of the model of a request, by default the first one. Raises ApiError 404 for an unknown name."""
        if name is None:
            return self.names[0]
        if name not in self._entries:
            problem = f"there is no model {name[:100]!r} (try: {', '.join(self.names)})"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return name

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """Load a model if necessary, and keep it loaded until the end of the block.

        Raises:
            ApiError: 404 for an unknown name, 503 for a model that can't be loaded.
        """
        name = self.find(name)
        entry = self._entries[name]
        entry.users += 1
        try:
            while entry.model is None:
                if entry.loading is None:
                    entry.loading = asyncio.create_task(self._load(name, entry))
                    entry.loading.add_done_callback(_ignore_error)
                await asyncio.shield(entry.loading)  # goes on if this client disconnects
            yield entry.model
        finally:
            entry.users -= 1
            entry.last_used = time.monotonic()

    async def close(self) -> None:
        """Close the engines of all models."""
        for entry in self._entries.values():
            if entry.model is not None:
                await asyncio.to_thread(entry.model.engine.close)

    def add(self, model: ServedModel) -> None:
        """Add a model that is loaded already."""
        self._entries[model.name].model = model

    async def _load(self, name: str, entry: _Entry) -> None:
        try:
            async with self._load_lock:
                await self._make_room(name, size_on_disk(entry.path))
                start = time.monotonic()
                try:
                    model = await asyncio.to_thread(load_model, name, entry.path, self.settings)
                except Exception as error:  # whatever is wrong with its files, the other models go on
                    logger.error("%s can't be loaded: %s", name, describe_error(error))
                    raise ApiError(503, f"the model {name} can't be loaded; the server's log says why") from None
                logger.info("loaded %s in %.1f s", name, time.monotonic() - start)
                try:
                    await self._make_room(name, model.num_bytes)
                except ApiError:
                    await asyncio.to_thread(model.engine.close)
                    raise
                entry.model = model
        finally:
            entry.loading = None

    async def _make_room(self, name: str, size: int) -> None:
        """Unload idle models until `size` bytes fit."""
        limit = self.settings.max_memory
        if limit is None:
            return
        if size > limit:
            problem = f"the model {name} takes {human_bytes(size)}, and the server may use {human_bytes(limit)}"
            logger.error("%s (--max-memory)", problem)
            raise ApiError(503, problem)
        while sum(model.memory for model in self.loaded) + size > limit:
            idle = [entry for entry in self._entries.values() if entry.model is not None and entry.users == 0]
            if not idle:
                problem = f"there is no memory for the model {name} while others are in use; try again"
                raise ApiError(503, problem, headers={"retry-after": "5"})
            await self._unload(min(idle, key=lambda entry: entry.last_used))

    async def _unload(self, entry: _Entry) -> None:
        model, entry.model = entry.model, None
        if model is not None:
            await asyncio.to_thread(model.engine.close)
            logger.info("unloaded %s", model.name)
            del model
            gc.collect()
            await asyncio.to_thread(device_thread.run, mx.clear_cache)


def _ignore_error(task: asyncio.Task[None]) -> None:
    """Mark an error as seen: if all clients have left, asyncio would report it a second time."""
    if not task.cancelled():
        task.exception()


def load_model(name: str, path: str, settings: ModelSettings) -> ServedModel:
    """Load a model from a path or hub id."""
    return ServedModel(name, load(path), settings)


def size_on_disk(path: str) -> int:
    """Bytes of the weight files at a path; 0 for a hub id."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    files = Path(path).glob("*") if os.path.isdir(path) else ()
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)
