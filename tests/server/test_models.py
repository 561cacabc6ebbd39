"""Several models: loaded when they are used, unloaded when memory is needed."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from starlette.testclient import TestClient

from mlxlm.generation import GenerationConfig, GenerationOptions
from mlxlm.server import models as models_module
from mlxlm.server.app import make_app
from mlxlm.server.errors import ApiError
from mlxlm.server.models import Models, ModelSettings, ServedModel
from mlxlm.utils.errors import ConfigError, MemoryLimitError
from tests.server.conftest import wait_until


class FakeEngine:
    """Needs 10 bytes for its caches."""

    def __init__(self):
        self.closed, self.max_bytes = False, None

    def limit_memory(self, max_bytes, max_bytes_alone):
        if max_bytes < 10:
            raise MemoryLimitError("no room for any text")
        self.max_bytes, self.max_bytes_alone = max_bytes, max_bytes_alone

    def close(self):
        self.closed = True


class FakeModel:
    """A model of 90 bytes."""

    num_bytes, context_length, load_seconds = 90, 64, 0.1

    def __init__(self, name):
        self.name, self.engine = name, FakeEngine()


STARTED, GO_ON = threading.Event(), threading.Event()  # of a model that takes long


@pytest.fixture
def loads(monkeypatch):
    """The names of the models that were loaded."""
    names = []
    STARTED.clear()
    GO_ON.clear()

    def load(name, path, settings):
        names.append(name)
        if path == "broken":
            raise OSError("disk on fire")
        if path == "slow":
            STARTED.set()
            assert GO_ON.wait(10)
        return FakeModel(name)

    monkeypatch.setattr(models_module, "load_model", load)
    return names


def make(max_memory=None, **paths):
    return Models({name: path or name for name, path in paths.items()}, ModelSettings(max_memory=max_memory))


async def touch(models, *names):
    for name in names:
        async with models.use(name):
            pass


def test_a_model_is_loaded_once_when_it_is_first_used(loads):
    models = make(a="", b="")

    async def use():
        await asyncio.gather(*(touch(models, "b") for _ in range(3)))
        await touch(models, "b")

    asyncio.run(use())
    assert loads == ["b"] and [m.name for m in models.loaded] == ["b"]


def test_the_first_model_is_the_default_and_unknown_names_are_a_404(loads):
    models = make(a="", b="")
    assert asyncio.run(models.find(None)) == "a"
    with pytest.raises(ApiError, match=r"model 'c' not found \(try: a, b; or mlxlm serve without MODEL") as error:
        asyncio.run(models.find("c"))
    assert error.value.status == 404


def test_the_least_recently_used_model_makes_room(loads):
    models = make(250, a="", b="", c="")
    asyncio.run(touch(models, "a", "b"))
    second = models.loaded[1]
    asyncio.run(touch(models, "a", "c"))
    assert [m.name for m in models.loaded] == ["a", "c"] and second.engine.closed
    asyncio.run(touch(models, "b"))
    assert [m.name for m in models.loaded] == ["b", "c"]
    assert loads == ["a", "b", "c", "b"]


def test_models_in_use_stay(loads, monkeypatch):
    models = make(150, a="", b="")

    async def use():
        async with models.use("a"):
            with pytest.raises(ApiError) as error:
                await touch(models, "b")
            assert error.value.status == 503 and error.value.headers["retry-after"]
            assert [m.name for m in models.loaded] == ["a"]

    monkeypatch.setattr(models_module, "_MAX_WAIT", 0.0)
    asyncio.run(use())


def test_a_model_waits_until_another_one_is_idle(loads):
    models = make(150, a="", b="", c="")

    async def use():
        async with models.use("a"):
            waiting, leaving = (asyncio.create_task(touch(models, name)) for name in "bc")
            while loads != ["a", "b", "c"] or models._load_lock.locked():
                await asyncio.sleep(0)
            leaving.cancel()
            assert not waiting.done() and [m.name for m in models.loaded] == ["a"]
        await waiting
        assert [m.name for m in models.loaded] == ["b"]

    asyncio.run(asyncio.wait_for(use(), 10))
    assert loads == ["a", "b", "c", "b"]  # nobody waits for "c" any more


def test_a_model_that_is_too_large_is_refused_and_unloads_nothing_else(loads, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(500))
    (tmp_path / "notes.txt").write_bytes(bytes(500))
    models = make(400, a="", large=str(tmp_path))
    asyncio.run(touch(models, "a"))
    with pytest.raises(ApiError, match="takes 500 B, and the server has 400 B for models"):
        asyncio.run(touch(models, "large"))
    assert [m.name for m in models.loaded] == ["a"] and loads == ["a"]


def test_a_model_that_is_larger_than_its_file_is_closed_again(loads):
    models = make(80, a="")
    with pytest.raises(ApiError, match="no room for any text"):
        asyncio.run(touch(models, "a"))
    assert not models.loaded


def test_weights_that_leave_no_memory_for_caches(lm):
    models = Models({"tiny": "unused"}, ModelSettings(max_memory=50_000))
    with pytest.raises(ConfigError, match=r"parameters of \d+ bits.*, and --max-memory is 50 kB"):
        models.add(ServedModel("tiny", lm, models.settings))


def test_loaded_models_share_the_memory(loads):
    models = Models({"a": "a", "b": "b"}, ModelSettings(max_memory=300, process_bytes=40))
    asyncio.run(touch(models, "a"))
    first = models.loaded[0].engine
    assert first.max_bytes == 300 - 40 - 90
    asyncio.run(touch(models, "b"))
    assert [model.engine.max_bytes for model in models.loaded] == [(300 - 40 - 180) // 2] * 2
    assert first.max_bytes_alone == 300 - 40 - 90
    asyncio.run(models.unload("b"))
    assert first.max_bytes == 170


def test_a_model_that_cannot_be_loaded(loads, caplog):
    models = make(a="broken", b="")
    for _ in range(2):
        with pytest.raises(ApiError, match="can't be loaded") as error:
            asyncio.run(touch(models, "a"))
        assert error.value.status == 503
    assert "disk on fire" in caplog.text and "disk" not in error.value.message
    asyncio.run(touch(models, "b"))
    assert loads == ["a", "a", "b"]


def test_a_model_that_takes_long_to_load(loads):
    """Requests for another model don't wait for it, and it is loaded once even if its first client leaves."""
    models = make(1000, slow="", fast="")

    async def use():
        await touch(models, "fast")
        leaving = asyncio.create_task(touch(models, "slow"))
        await asyncio.to_thread(STARTED.wait)
        leaving.cancel()
        await asyncio.wait_for(touch(models, "fast"), 10)
        staying = asyncio.create_task(touch(models, "slow"))
        await asyncio.sleep(0)
        GO_ON.set()
        await staying

    asyncio.run(use())
    assert loads == ["fast", "slow"] and len(models.loaded) == 2


def test_a_model_whose_client_leaves_while_it_is_loaded_is_unloaded_when_idle(loads):
    models = make(slow="")

    async def use():
        leaving = asyncio.create_task(models.load("slow", keep_alive="1ms"))
        await asyncio.to_thread(STARTED.wait)
        leaving.cancel()
        await asyncio.wait([leaving])
        GO_ON.set()
        while not models.loaded:
            await asyncio.sleep(0)
        assert 0 < (models.expires_at(models.loaded[0]) - datetime.now(UTC)).total_seconds() < 0.001
        while models.loaded:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(use(), 10))


def test_a_model_of_the_command_line_is_unloaded_without_any_request(loads):
    models = Models({"a": "a"}, ModelSettings(keep_alive="1ms"))
    models.add(FakeModel("a"))
    with TestClient(make_app(models)):
        assert wait_until(lambda: not models.loaded)


def test_a_model_that_was_used_again_while_another_one_was_loaded_stays(loads):
    models = make(slow="", a="")

    async def use():
        await touch(models, "a")
        loading = asyncio.create_task(touch(models, "slow"))
        await asyncio.to_thread(STARTED.wait)
        unloading = asyncio.create_task(models.unload("a"))  # waits for the other one
        await asyncio.sleep(0)
        await touch(models, "a")
        GO_ON.set()
        await asyncio.gather(loading, unloading)
        assert len(models.loaded) == 2

    asyncio.run(asyncio.wait_for(use(), 10))


def test_a_model_whose_files_are_removed_stays_until_it_is_unloaded(home, model_folder):
    root = home / "models"
    shutil.copytree(model_folder, root / "tiny")
    models = Models({}, ModelSettings(models_dirs=[str(root)]))
    with TestClient(make_app(models)) as client:

        def ask(path="/api/generate", **fields):
            return client.post(path, json={"model": "tiny", "stream": False, **fields})

        assert ask().json()["done_reason"] == "load"
        shutil.rmtree(root / "tiny")
        assert ask(prompt="Hello!", options={"num_predict": 2}).json()["eval_count"] == 2
        [model] = client.get("/api/ps").json()["models"]
        assert model["name"] == "tiny:latest" and model["details"]["family"] == "llama"
        assert "tiny" not in [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert ask("/api/show").json()["template"]
        assert ask(keep_alive=0).json()["done_reason"] == "unload" and not models.loaded
        assert ask(prompt="Hello!").status_code == 404


def test_defaults_are_those_of_the_server_then_of_the_model(lm):
    config = GenerationConfig({"temperature": 0.2, "top_k": 5})
    model = ServedModel("tiny", replace(lm, generation_config=config), ModelSettings(defaults={"top_k": 9}))
    assert model.defaults == GenerationOptions(temperature=0.2, top_k=9, max_tokens=None)
    models = Models({"tiny": "unused"}, model.settings)
    models.add(model)
    with TestClient(make_app(models)) as client:
        answer = client.post("/v1/responses", json={"input": "Hello!", "max_output_tokens": 3, "top_p": 0.5}).json()
    assert (answer["temperature"], answer["top_p"]) == (0.2, 0.5)
