"""The tiny model of the chat tests, served in this process; and a real server on a free port."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from mlxlm import tokenizer
from mlxlm.generation import LoadedModel
from mlxlm.server import run
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from tests.chat.conftest import CONTEXT, TEMPLATE, TEXT, decoder  # noqa: F401 - a fixture
from tests.server.apis import events
from tests.small_models import write_folder

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture(scope="session")
def lm(decoder, tmp_path_factory) -> LoadedModel:  # noqa: F811
    tokens = tokenizer.train(TEXT, 300)
    tokens.chat_template = TEMPLATE
    return LoadedModel(decoder, tokens, decoder.config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def model_folder(lm, tmp_path_factory):
    """The same model as a folder."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", lm.model, lm.config, lm.tokenizer)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine without models, except for the bundled ones."""
    for name in ("HOME", "HF_HOME", "MLXLM_MODELS", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def served(lm):
    """The model with its engine."""
    model = ServedModel("tiny", lm, ModelSettings())
    yield model
    model.engine.close()


class OpenModels(Models):
    """Models whose engines stay open when a server ends or unloads them, for the next test."""

    async def close(self) -> None:
        pass

    async def _unload(self, entry) -> None:
        pass


@pytest.fixture
def models(served):
    """The models of a server: one, loaded."""
    models = OpenModels({"tiny": "unused"}, served.settings)
    models.add(served)
    return models


@pytest.fixture
def client(models):
    """A client of the application."""
    with TestClient(make_app(models)) as client:
        yield client


@pytest.fixture
def chat(client):
    """`chat(**fields)`: the response to a short question, or with `stream` the data of its events."""

    def ask(**fields):
        response = client.post("/v1/chat/completions", json={**HELLO, "max_tokens": 20, "temperature": 0, **fields})
        if response.status_code != 200 or not fields.get("stream"):
            return response.json()
        return events(response.text)

    return ask


@contextmanager
def running(app, shutdown_timeout: int = 5, idle_timeout: int = run.IDLE_TIMEOUT):
    """Run a real server in a thread; yields its address."""
    listener = run.bind("127.0.0.1", 0)
    server = run.make_server(app, shutdown_timeout, idle_timeout=idle_timeout)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield run.address_of(listener, "127.0.0.1")
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def live(models):
    """The address of a real server."""
    with running(make_app(models)) as address:
        yield address


def wait_until(condition) -> bool:
    """Whether `condition()` becomes true. Only a failing test waits for long."""
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
