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
from mlxlm.server import model_description
from mlxlm.server import models as models_module
from mlxlm.server.app import make_app
from mlxlm.server.errors import ApiError
from mlxlm.server.model_library import ModelLibrary
from mlxlm.server.models import Models, ModelSettings
from mlxlm.server.options import parse_alias, parse_keep_alive
from mlxlm.utils.errors import ConfigError
from tests.server.conftest import HELLO
from tests.server.test_models import FakeModel

BUNDLED = "small-world"


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
    assert (
        library.any_name == "me/tiny"
        and library.find("gpt-5") is None
        and library.find("A") == BUNDLED
        and "*" not in library.names
    )


def test_descriptions_are_read_once_and_again_when_the_files_change(home, folder, lm):
    library = ModelLibrary({}, [folder])
    library.refresh()
    tiny = library.describe("me/tiny")
    assert (tiny.format, tiny.family, tiny.quantization) == ("safetensors", "llama", "F32")
    assert tiny.parameters == lm.config.parameter_count() and tiny.memory == lm.weight_bytes
    assert tiny.context_length == lm.config.max_position_embeddings and tiny.problem is None
    assert library.describe("me/tiny") == tiny
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


def test_names_that_differ_in_case(home, model_folder):
    for name in ("Tiny", "tiny"):
        shutil.copytree(model_folder, home / "models" / name)
    library = ModelLibrary({}, [home / "models"])
    library.refresh()
    assert [library.find(name) for name in ("Tiny", "tiny")] == ["Tiny", "tiny"] and library.find("TINY")


def test_an_alias_for_any_name_leaves_new_models_their_names(home, model_folder, monkeypatch):
    monkeypatch.setattr(models_module, "_REFRESH_INTERVAL", 0.0)
    models = Models({}, ModelSettings(models_dirs=[str(home)], aliases=[f"*={BUNDLED}"]))
    assert asyncio.run(models.find("new")) == BUNDLED
    shutil.copytree(model_folder, home / "new")
    assert asyncio.run(models.find("new")) == "new"


def test_what_the_files_say_is_kept_for_the_next_start(home, folder, monkeypatch):
    def read():
        library = ModelLibrary({}, [folder])
        return dict(library.describe_all()), library.describe("me/tiny", with_tokenizer=True)

    opened = []
    open_checkpoint = model_description.open_checkpoint
    monkeypatch.setattr(model_description, "open_checkpoint", lambda path: opened.append(path) or open_checkpoint(path))
    first = read()
    assert first[1].chat_template and not first[1].fills_in_the_middle
    broken = [name for name, description in first[0].items() if description.problem]
    opened.clear()
    second = read()
    assert second[0].keys() == first[0].keys() and second[1] == first[1]
    assert len(opened) == len(broken) == 3  # these are tried again
    file = model_description._kept_file()
    for damage in (b"{", b"{}", file.read_bytes().replace(b'"format"', b'"form"'), file.read_bytes()[:-9]):
        file.write_bytes(damage)
        assert read() == first


def test_a_home_folder_that_cannot_be_written(home, folder, monkeypatch):
    (home / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    assert dict(ModelLibrary({}, [folder]).describe_all())["me/tiny"].family == "llama"


def test_an_internal_error_is_that_of_one_model(home, folder, monkeypatch):
    monkeypatch.setattr(model_description.GenerationConfig, "read", lambda path: {}["example"])
    described = dict(ModelLibrary({}, [folder]).describe_all())
    assert "KeyError" in described["me/tiny"].problem and "a.gguf" in described["a"].problem


def test_a_request_without_a_name_gets_a_model_that_can_be_opened(home, folder):
    models = Models({}, ModelSettings(models_dirs=[str(folder)]))
    assert models.library.names[0] == "a" and asyncio.run(models.find(None)) == "me/tiny"


def test_idle_models_are_unloaded(fakes):
    async def use():
        await touch(fakes, "a")
        assert fakes.expires_at(fakes.loaded[0]) is not None and fakes.loaded
        engine = fakes.loaded[0].engine
        async with fakes.use("a", "0s"):  # a request decides over the time after it
            await touch(fakes, "a", 0)
            await asyncio.sleep(0.01)
            assert not engine.closed
        while fakes.loaded:
            await asyncio.sleep(0)
        await touch(fakes, "a", -1)
        assert fakes.expires_at(fakes.loaded[0]) is None
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


def test_aliases_of_unknown_models_are_errors(home):
    models = Models({"tiny": "unused"}, ModelSettings(aliases=["gpt=tni"]))
    with pytest.raises(ConfigError, match=r"there is no model 'tni' \(try: tiny"):
        models.library.check_aliases()
    Models({"tiny": "unused"}, ModelSettings(aliases=["*=TINY:latest"])).library.check_aliases()


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
