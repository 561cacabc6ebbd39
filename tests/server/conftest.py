"""A tiny chat model with random weights, served in this process; and a real server on a free port."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import save_weights
from mlxlm.families import config_to_hf
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from mlxlm.server import run
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from mlxlm.utils.json_files import write_json
from tests.server.apis import events

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = 7  # special tokens of a trained tokenizer
TEXT = ["The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n" * 4]
CONTEXT = 4096
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture(scope="session")
def lm(tiny_config, tmp_path_factory) -> LoadedModel:
    """Its answers never end by themselves, and are long enough to be interrupted."""
    tokens = tokenizer.train(TEXT, 300)
    tokens.chat_template = TEMPLATE
    model = Decoder(tiny_config.with_changes(tie_word_embeddings=False, max_position_embeddings=CONTEXT))
    model.init_weights(seed=3)
    # Logits far apart, so that rounding decides nothing, but 0 for the special tokens: they would end answers.
    model.lm_head.weight = model.lm_head.weight * 20 * (mx.arange(300) >= SPECIAL)[:, None]
    mx.eval(model.parameters())
    return LoadedModel(model, tokens, model.config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def model_folder(lm, tmp_path_factory):
    """The same model as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_weights(folder, dict(tree_flatten(lm.model.parameters())))
    write_json(folder / "config.json", config_to_hf(lm.config))
    lm.tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def served(lm):
    """The model with its engine."""
    model = ServedModel("tiny", lm, ModelSettings())
    yield model
    model.engine.close()


class OpenModels(Models):
    """Models whose engines stay open when a server ends, for the next test."""

    async def close(self) -> None:
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
def running(app, shutdown_timeout: int = 5):
    """Run a real server in a thread; yields its address."""
    listener = run.bind("127.0.0.1", 0)
    server = run.make_server(app, shutdown_timeout)
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


def wait_until(condition, seconds: float = 1.0) -> bool:
    """Whether `condition()` becomes true in this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
