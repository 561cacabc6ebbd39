"""The models of a server: loaded when first used, unloaded when idle or when another model needs the memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVOptions
from mlxlm.chat.chat_encoder import ChatEncoder, answer_eos_token_ids, chat_encoder
from mlxlm.checkpoint.catalog import catalog
from mlxlm.config import ModelConfig
from mlxlm.generation import Engine, LoadedModel, device_thread, load
from mlxlm.generation.distributed import load_split
from mlxlm.generation.request import context_limit
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.generation.workers import Workers
from mlxlm.server.downloads import Downloads
from mlxlm.server.errors import ApiError, invalid, unavailable
from mlxlm.server.memory import share
from mlxlm.server.model_description import ModelDescription, tokenizer_facts
from mlxlm.server.model_library import ModelLibrary
from mlxlm.server.options import ModelOptions, parse_alias, parse_keep_alive
from mlxlm.utils.errors import ConfigError, MemoryLimitError, TextTooLongError
from mlxlm.utils.formatting import human_bytes, human_count

logger = logging.getLogger("mlxlm.server")

MAX_COUNTED = 1 << 17  # tokens that endpoints return or count for a model with any context
_MAX_PROMPT_TOKENS = 1 << 20  # with a rotating cache, which has no context length
_MAX_WAIT = 30.0  # seconds, for a model in use to become idle; clients wait a minute or more for an answer
_REFRESH_INTERVAL = 1.0  # seconds; with an alias for any name, unknown names are common


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """What all models of a server share: `ModelOptions`, and what the command line made of its other options.

    Attributes:
        defaults: Fields of GenerationOptions, for what a request doesn't set; then the model's own defaults apply.
        kv: Options of the key-value caches.
        make_speculation: Returns the decoder for speculative decoding; None for no speculation.
        adapter: An adapter that is merged into the weights.
        workers: The other processes that share the models.
        process_bytes: Bytes of `max_memory` that aren't left for models, see `limit_process`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv: KVOptions = field(default_factory=KVOptions)
    make_speculation: Callable[[], SpeculativeDecoder] | None = None
    adapter: Path | None = None
    workers: Workers | None = None
    process_bytes: int = 0


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
        load_seconds: How long it took to load the model.
        description: What is known of it; set by `Models`. Its files may change or be removed meanwhile.
    """

    description: ModelDescription

    def __init__(self, name: str, lm: LoadedModel, settings: ModelSettings, load_seconds: float = 0.0):
        """Create the engine of a model.

        Raises:
            MlxlmError: The chat template or the settings don't fit the model.
        """
        self.name, self.lm, self.settings, self.load_seconds = name, lm, settings, load_seconds
        self.encoder: ChatEncoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, settings.chat_template)
        self.eos_token_ids = answer_eos_token_ids(lm, self.encoder)
        self.defaults = lm.generation_options(**{"max_tokens": None, **settings.defaults})
        self.num_bytes = lm.weight_bytes
        self.engine = Engine(
            lm,
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
    """A model that was named in a request.

    Attributes:
        model: The model, while it is loaded.
        users: Requests that use it.
        last_used: The time when the last of them ended, or when it was loaded.
        keep_alive: Seconds after which it is unloaded when nobody uses it; None for never.
        timer: Unloads it.
        loading: The task that loads it.
    """

    model: ServedModel | None = None
    users: int = 0
    last_used: float = 0.0
    keep_alive: float | None = None
    timer: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] | None = None


def check_keep_alive(value: float | str) -> float | None:
    """The seconds of a request's `keep_alive`, see `parse_keep_alive`. Raises ApiError 400 for something else."""
    try:
        return parse_keep_alive(value)
    except ConfigError as error:
        raise invalid(str(error), "keep_alive") from None


class _AllInUseError(Exception):
    """There is no memory for another model, and all others are in use."""


class Models:
    """The models that requests can name.

    Args:
        paths: {name: path, name of the catalog, or hub id}. The first is the one of requests that name none. Empty for
            all models on this machine, those of `settings.models_dirs` among them.
        settings: Settings of all models. The loaded ones share `max_memory`. If it doesn't have room for another one,
            idle models are unloaded, the least recently used first.

    Attributes:
        library: The models that can be loaded.
        downloads: Downloads more of them.
    """

    def __init__(self, paths: Mapping[str, str], settings: ModelSettings):
        self.settings = settings
        folders = [Path(folder) for folder in settings.models_dirs]
        self.library = ModelLibrary(paths, folders, dict(map(parse_alias, settings.aliases)))
        self.downloads = Downloads(self.library)
        self._default_keep_alive = parse_keep_alive(settings.keep_alive or ("30m" if self.library.serves_all else -1))
        self._entries: dict[str, _Entry] = {}
        self._load_lock = asyncio.Lock()
        self._one_is_idle = asyncio.Event()  # set and replaced whenever a model becomes idle
        self._refreshed = -_REFRESH_INTERVAL
        self.library.refresh()

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are in memory."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def get_loaded(self, name: str) -> ServedModel | None:
        """The model of this name, if it is in memory."""
        return self._entries[name].model if name in self._entries else None

    async def find(self, name: str | None, *, or_any: bool = True) -> str:
        """The model that a name of a request stands for.

        Args:
            name: A name or an alias. None or "" for the first model of the command line; if it has none, for the model
                that was used last, or the first one that can be opened.
            or_any: Whether an unknown name stands for the model of the alias `*`.

        Raises:
            ApiError: 404 for an unknown name, with the closest ones.
        """
        if not name:
            used = {name: entry.last_used for name, entry in self._entries.items() if entry.model is not None}
            if used and self.library.serves_all:
                return max(used, key=lambda name: used[name])
            return await asyncio.to_thread(self.library.first)
        found, other, now = self.library.find(name), self.library.any_name if or_any else None, time.monotonic()
        if found is None and (other is None or now - self._refreshed >= _REFRESH_INTERVAL):
            self._refreshed = now
            await asyncio.to_thread(self.library.refresh)
            found = self.library.find(name)
        if found is None and self.get_loaded(name):
            return name  # although its files were removed
        found = found or other
        if found is None:
            raise self._not_found(name)
        return found

    async def describe(self, name: str | None, *, with_tokenizer: bool = False) -> ModelDescription:
        """What is known of a model without loading it, see `Descriptions.describe`.

        Raises:
            ApiError: 404 for an unknown name.
        """
        name = await self.find(name)
        model = self.get_loaded(name)
        if model is None:
            return await asyncio.to_thread(self.library.describe, name, with_tokenizer)
        facts = tokenizer_facts(model.lm.tokenizer) if with_tokenizer else {}
        return replace(model.description, **facts)

    async def describe_all(self) -> list[tuple[str, ModelDescription]]:
        """The names that requests can use and what is known of their models, without those that can't be opened."""
        loaded = {model.name: model.description for model in self.loaded}
        described = await asyncio.to_thread(self.library.describe_all)
        described = [(name, loaded.get(description.name, description)) for name, description in described]
        return [(name, description) for name, description in described if description.problem is None]

    def expires_at(self, model: ServedModel) -> datetime | None:
        """When a loaded model is unloaded; None if it stays."""
        entry = self._entries[model.name]
        if entry.keep_alive is None:
            return None
        idle = 0.0 if entry.users else time.monotonic() - entry.last_used
        return datetime.now(UTC) + timedelta(seconds=entry.keep_alive - idle)

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: float | str | None = None) -> AsyncIterator[ServedModel]:
        """Load a model if necessary, and keep it loaded until the end of the block.

        Args:
            name: See `find`.
            keep_alive: How long it stays loaded after that, see `parse_keep_alive`; None for the server's `keep_alive`.

        Raises:
            ApiError: 404 for an unknown name, 400 for an invalid `keep_alive`, 503 for a model that can't be loaded.
        """
        seconds = self._default_keep_alive if keep_alive is None else check_keep_alive(keep_alive)
        name = await self.find(name)
        entry = self._entries.setdefault(name, _Entry())
        entry.users += 1
        entry.keep_alive = seconds
        if entry.timer is not None:
            entry.timer.cancel()
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
            self._unload_when_idle(entry)
            if not entry.users:
                self._one_is_idle.set()
                self._one_is_idle = asyncio.Event()

    async def load(self, name: str | None, keep_alive: float | str | None = None) -> ServedModel:
        """Load a model, unless it is loaded. The errors are those of `use`."""
        async with self.use(name, keep_alive) as model:
            return model

    async def unload(self, name: str) -> bool:
        """Unload a model, as soon as the requests that use it have ended.

        Returns:
            Whether it was loaded.

        Raises:
            ApiError: 404 for an unknown name.
        """
        entry = self._entries.get(await self.find(name))
        if entry is None or entry.model is None:
            return False
        entry.keep_alive = 0.0
        await self._unload_if_idle(entry, entry.last_used)
        return True

    def start(self) -> None:
        """Start the time after which idle models are unloaded, for those that were added before the server ran."""
        for entry in self._entries.values():
            self._unload_when_idle(entry)

    async def close(self) -> None:
        """Close the engines of all models."""
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.model is not None:
                await asyncio.to_thread(entry.model.engine.close)

    def add(self, model: ServedModel) -> None:
        """Add a model that is loaded already. Raises ConfigError if there is no memory for it."""
        try:
            self._share_memory([*self.loaded, model])
        except MemoryLimitError as error:
            limit = human_bytes(self.settings.max_memory or 0)
            problem = f"the model {model.name} takes {_described_size(model)}, and --max-memory is {limit}"
            raise ConfigError(f"{problem}: {error.message}", "a larger --max-memory, or a smaller model") from None
        model.description = _describe_loaded(self.library.describe(model.name), model)
        self._entries[model.name] = _Entry(model, last_used=time.monotonic(), keep_alive=self._default_keep_alive)

    def _not_found(self, name: str) -> ApiError:
        closest = self.library.closest(name)
        if not self.library.serves_all:
            hint = f"{', '.join(closest or self.library.names)}; or mlxlm serve without MODEL, which serves all models"
        elif name in catalog():
            hint = f"mlxlm models pull {name}"
        else:
            hint = ", ".join(closest) or "GET /v1/models, which lists them"
        problem = f"model {name[:100]!r} not found (try: {hint})"
        return ApiError(404, problem, param="model", code="model_not_found")

    async def _load(self, name: str, entry: _Entry) -> None:
        """Load a model. If those in use leave no memory for it, wait until one of them is idle."""
        end = time.monotonic() + _MAX_WAIT
        try:
            while True:
                one_is_idle = self._one_is_idle
                try:
                    async with self._load_lock:
                        await self._load_now(name, entry)
                    return
                except _AllInUseError:
                    try:
                        await asyncio.wait_for(one_is_idle.wait(), max(0.0, end - time.monotonic()))
                    except TimeoutError:
                        problem = f"there is no memory for the model {name} while others are in use; try again"
                        raise unavailable(problem) from None
                    if not entry.users:
                        return  # its clients have left
        finally:
            entry.loading = None

    async def _load_now(self, name: str, entry: _Entry) -> None:
        if self.library.find(name) is None:  # removed while others were loaded
            raise self._not_found(name)
        description = await asyncio.to_thread(self.library.describe, name)
        await self._make_room(name, description.memory)
        try:
            model = await asyncio.to_thread(load_model, name, self.library.source(name), self.settings)
        except Exception as error:  # whatever is wrong with its files, the other models go on
            logger.error("%s can't be loaded: %s", name, describe_error(error))
            raise ApiError(503, f"the model {name} can't be loaded; the server's log says why") from None
        logger.info("loaded %s in %.2f s", name, model.load_seconds)
        try:
            await self._fit(model)
        except BaseException:
            await asyncio.to_thread(model.engine.close)
            raise
        model.description = _describe_loaded(description, model)
        entry.model, entry.last_used = model, time.monotonic()
        self._unload_when_idle(entry)  # if its clients have left meanwhile

    async def _make_room(self, name: str, size: int) -> None:
        """Unload idle models until there is memory for weights of `size` bytes."""
        limit = self.settings.max_memory
        if limit is None:
            return
        if size > limit - self.settings.process_bytes:
            room = human_bytes(max(0, limit - self.settings.process_bytes))
            problem = f"the model {name} takes {human_bytes(size)}, and the server has {room} for models"
            logger.error("%s (--max-memory)", problem)
            raise ApiError(503, problem)
        while share(limit, self.settings.process_bytes, [size, *(model.num_bytes for model in self.loaded)]) < 0:
            await self._unload_oldest()

    async def _fit(self, model: ServedModel) -> None:
        """Unload idle models until there is memory for the caches of all others and of a new one."""
        while True:
            try:
                return await asyncio.to_thread(self._share_memory, [*self.loaded, model])
            except MemoryLimitError as error:
                await asyncio.to_thread(self._share_memory, self.loaded)  # as it was before
                if not self.loaded:
                    problem = f"there is no memory for the model {model.name}: {error.message}"
                    logger.error("%s (--max-memory)", problem)
                    raise ApiError(503, problem) from None
                await self._unload_oldest()

    async def _unload_oldest(self) -> None:
        """Unload the idle model that wasn't used for longest. Raises _AllInUseError if none is idle."""
        idle = [entry for entry in self._entries.values() if entry.model is not None and entry.users == 0]
        if not idle:
            raise _AllInUseError
        await self._unload(min(idle, key=lambda entry: entry.last_used))

    def _share_memory(self, models: Sequence[ServedModel]) -> None:
        """Divide the memory among models. Raises MemoryLimitError if it isn't enough for the caches of one of them."""
        if self.settings.max_memory is None or not models:
            return
        limit, process = self.settings.max_memory, self.settings.process_bytes
        size = share(limit, process, [model.num_bytes for model in models])
        for model in models:
            model.engine.limit_memory(size, share(limit, process, [model.num_bytes]))

    def _unload_when_idle(self, entry: _Entry) -> None:
        """Unload a model after its `keep_alive`, unless it is used until then."""
        if entry.users or entry.model is None or entry.keep_alive is None:
            return
        loop, last_used = asyncio.get_running_loop(), entry.last_used
        entry.timer = loop.call_later(
            entry.keep_alive, lambda: loop.create_task(self._unload_if_idle(entry, last_used))
        )

    async def _unload_if_idle(self, entry: _Entry, last_used: float) -> None:
        async with self._load_lock:
            if not entry.users and entry.last_used == last_used:  # not used while another model was loaded
                await self._unload(entry)

    async def _unload(self, entry: _Entry) -> None:
        model, entry.model = entry.model, None
        if model is not None:
            await asyncio.to_thread(model.engine.close)
            logger.info("unloaded %s", model.name)
            del model
            gc.collect()
            await asyncio.to_thread(device_thread.run, mx.clear_cache)
            await asyncio.to_thread(self._share_memory, self.loaded)


def _ignore_error(task: asyncio.Future[Any]) -> None:
    """Mark an error as seen: if all clients have left, asyncio would report it a second time."""
    if not task.cancelled():
        task.exception()


def _describe_loaded(description: ModelDescription, model: ServedModel) -> ModelDescription:
    return replace(description, loaded=True, context_length=model.context_length, problem=None)


def load_model(name: str, path: str, settings: ModelSettings) -> ServedModel:
    """Load a model from a path, name of the catalog or hub id."""
    start = time.monotonic()
    workers, adapter = settings.workers, settings.adapter
    lm = load(path, adapter) if workers is None else load_split(workers, path, adapter)
    return ServedModel(name, lm, settings, time.monotonic() - start)


def _described_size(model: ServedModel) -> str:
    """The size of a model's weights in memory, and why it can be larger than its file."""
    size, config = human_bytes(model.num_bytes), model.lm.config
    if not isinstance(config, ModelConfig):
        return size
    count = config.parameter_count()
    bits = 8 * model.num_bytes / count
    why = ", which is fast only in float32" if ON_CPU and bits > 16 else ""
    return f"{size} ({human_count(count)} parameters of {bits:.3g} bits on this device{why})"
