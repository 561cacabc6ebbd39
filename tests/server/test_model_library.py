"""Models that are found on this machine: their names, aliases and descriptions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlxlm.checkpoint.catalog import bundled_models
from mlxlm.server import models as models_module
from mlxlm.server.app import make_app
from mlxlm.server.errors import ApiError
from mlxlm.server.model_library import ModelLibrary
from mlxlm.server.models import Models, ModelSettings
from mlxlm.server.options import parse_alias, parse_keep_alive
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.server.conftest import HELLO
from tests.server.test_models import FakeModel

BUNDLED = "small-world"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine without models, except for the bundled ones."""
    for name in ("HOME", "HF_HOME", "MLXLM_MODELS", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


@pytest.fixture
def folder(home, model_folder):
    """A folder with the models `me/tiny`, `a` and `me/two/b` and `c`."""
    root = home / "models"
    shutil.copytree(model_folder, root / "me" / "tiny")
    (root / "me" / "two").mkdir()
    for name in ("a.gguf", "me/two/b.gguf", "me/two/c-00001-of-00002.gguf", "me/two/c-00002-of-00002.gguf"):
        (root / name).write_bytes(b"GGUF")
    return root


def add_to_ollama(home: Path, name: str, content: bytes) -> Path:
    digest = hashlib.sha256(content).hexdigest()
    model, _, tag = name.partition(":")
    manifest = home / "OLLAMA_MODELS/manifests/registry.ollama.ai/library" / model / tag
    blob = home / "OLLAMA_MODELS/blobs" / f"sha256-{digest}"
    for file in (manifest, blob):
        file.parent.mkdir(parents=True, exist_ok=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob.write_bytes(content)
    return blob


def test_names(home, folder):
    blob = add_to_ollama(home, "llama3.2:latest", b"GGUF1")
    add_to_ollama(home, "other:1b", b"GGUF1")
    library = ModelLibrary({}, [folder], {"gpt-4o": "TINY", "lost": "nothing"})
    assert library.names == []
    library.refresh()
    assert library.names == ["a", "me/tiny", "me/two/b", "me/two/c", "llama3.2:latest", *bundled_models(), "gpt-4o"]
    for name, found in {
        "me/tiny": "me/tiny",
        "Tiny:latest": "me/tiny",
        "C": "me/two/c",
        "llama3.2": "llama3.2:latest",
        "LLAMA3.2:LATEST": "llama3.2:latest",
        "other:1b": "llama3.2:latest",  # the same file
        "ollama:llama3.2:latest": "llama3.2:latest",
        "GPT-4o": "me/tiny",
        "small-world:latest": BUNDLED,
        "lost": None,
        str(folder): None,
        "../models/a": None,
    }.items():
        assert library.find(name) == found, name
    assert library.source("llama3.2:latest") == str(blob)
    assert library.closest("tiny2")[0] == "me/tiny"


def test_any_name(home, folder):
    library = ModelLibrary({}, [folder], {"*": "tiny", "a": BUNDLED})
    library.refresh()
    assert library.find("gpt-5") == "me/tiny" and library.find("A") == BUNDLED and "*" not in library.names


def test_descriptions_are_read_once_and_again_when_the_files_change(home, folder, lm):
    library = ModelLibrary({}, [folder])
    library.refresh()
    tiny = library.describe("me/tiny")
    assert (tiny.format, tiny.family, tiny.quantization) == ("safetensors", "llama", "F32")
    assert tiny.parameters == lm.config.parameter_count() and tiny.memory == lm.weight_bytes
    assert tiny.context_length == lm.config.max_position_embeddings and tiny.problem is None
    assert library.describe("me/tiny") is tiny
    (folder / "me/tiny/config.json").write_text("{}")
    changed = library.describe("me/tiny")
    assert changed.problem and changed.digest != tiny.digest and changed.family is None
    assert "a.gguf" in library.describe("a").problem


def test_models_are_found_while_the_server_runs(home, model_folder):
    root = home / "models"
    root.mkdir()
    with TestClient(make_app(Models({}, ModelSettings(models_dirs=[str(root)])))) as client:

        def ask(name):
            return client.post("/v1/chat/completions", json={**HELLO, "model": name, "max_tokens": 2})

        assert ask("later").status_code == 404
        shutil.copytree(model_folder, root / "later")
        shutil.copytree(model_folder, root / "broken")
        (root / "broken" / "config.json").write_text("{}")
        assert ask("LATER").json()["model"] == "later"
        listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
        assert set(listed) == {"later", *bundled_models()}  # "broken" can't be opened
        assert listed["later"]["loaded"] and not listed[BUNDLED]["loaded"]
        assert listed[BUNDLED]["context_length"] == 512 and listed[BUNDLED]["quantization"] == "4bit"
        assert ask(None).json()["model"] == "later"  # which was used last
        assert client.post("/models/unload", json={"model": "later"}).json()["success"]
        shutil.rmtree(root / "later")
        assert ask("later").status_code == 404
        assert client.post("/models/load", json={"model": "nothing"}).status_code == 404


@pytest.fixture
def fakes(home, monkeypatch):
    monkeypatch.setattr(models_module, "load_model", lambda name, _path, _settings: FakeModel(name))
    return Models({"a": "a", "b": "b"}, ModelSettings(keep_alive="1h"))


async def touch(models, name, keep_alive=None):
    async with models.use(name, keep_alive):
        pass


def test_idle_models_are_unloaded(fakes):
    async def use():
        await touch(fakes, "a")
        assert fakes.expires_at("a") is not None and fakes.loaded
        engine = fakes.loaded[0].engine
        async with fakes.use("a", "0s"):  # a request decides over the time after it
            await touch(fakes, "a", 0)
            await asyncio.sleep(0.01)
            assert not engine.closed
        while fakes.loaded:
            await asyncio.sleep(0)
        await touch(fakes, "a", -1)
        assert fakes.expires_at("a") is None
        with pytest.raises(ApiError, match="keep_alive is 'soon'"):
            await touch(fakes, "a", "soon")

    asyncio.run(asyncio.wait_for(use(), 10))


def test_load_and_unload(fakes):
    async def use():
        model = await fakes.load("a")
        assert (await fakes.describe("a")).loaded and not (await fakes.describe("b")).loaded
        async with fakes.use("a"):
            assert await fakes.unload("a") and not model.engine.closed
        while not model.engine.closed:
            await asyncio.sleep(0)
        assert not await fakes.unload("a")

    asyncio.run(asyncio.wait_for(use(), 10))


def test_pull(home, model_folder, monkeypatch):
    models = Models({}, ModelSettings(models_dirs=[str(home)]))
    entry = "qwen3-4b"

    def download(entry, progress):
        with progress(entry, entry.sources[0]) as update:
            update(5)
        raise CheckpointError("the hub can't be reached", "a network connection")

    monkeypatch.setattr(models_module, "download", download)

    async def pull(name):
        return [progress async for progress in models.pull(name)]

    with pytest.raises(ApiError, match=r"the hub can't be reached \(try") as error:
        asyncio.run(pull(entry))
    assert error.value.status == 502
    monkeypatch.setattr(models_module.hub, "download", lambda id: shutil.copytree(model_folder, home / id))
    assert asyncio.run(pull("org/name"))[-1].name == "org/name"
    for name in ("qwen3-4", "/etc", "../x", ""):
        with pytest.raises(ApiError) as error:
            asyncio.run(pull(name))
        assert error.value.status == 404
    [last] = asyncio.run(pull(BUNDLED))
    assert last.name == BUNDLED
    with pytest.raises(ApiError, match="only serves the models of its command line"):
        asyncio.run(anext(Models({"a": "a"}, ModelSettings()).pull(entry)))


def test_aliases_of_unknown_models_are_errors(home):
    models = Models({"tiny": "unused"}, ModelSettings(aliases=["gpt=tni"]))
    with pytest.raises(ConfigError, match=r"there is no model 'tni' \(try: tiny"):
        models.check_aliases()
    Models({"tiny": "unused"}, ModelSettings(aliases=["*=TINY:latest"])).check_aliases()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (90, 90),
        ("1.5", 1.5),
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        (-1, None),
        ("-5m", None),
    ],
)
def test_keep_alive(value, seconds):
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 minutes", True, "1e3", "nan", float("nan"), float("inf")])
def test_keep_alive_is_a_duration(value):
    with pytest.raises(ConfigError, match="keep_alive is"):
        parse_keep_alive(value)


def test_invalid_options():
    for options in ({"aliases": ["gpt"]}, {"aliases": ["=x"]}, {"keep_alive": "soon"}):
        with pytest.raises(ConfigError):
            ModelSettings(**options)
    assert parse_alias("a=b=c") == ("a", "b=c")
