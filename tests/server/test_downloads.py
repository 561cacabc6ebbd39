"""Downloads that clients ask for."""

from __future__ import annotations

import asyncio
import shutil
import threading

import httpx
import pytest

from mlxlm.server import downloads as module
from mlxlm.server.downloads import Downloads
from mlxlm.server.errors import ApiError
from mlxlm.server.model_library import ModelLibrary
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.fake_hub import FakeHub
from tests.server.test_run import Process


@pytest.fixture
def downloads(home, monkeypatch):
    """Downloads into a folder, which are called `org/name`."""
    monkeypatch.setattr(module, "_INTERVAL", 0.001)
    library = ModelLibrary({}, [home / "models"])
    library.refresh()
    return Downloads(library)


@pytest.fixture
def arrive(home, model_folder, monkeypatch):
    """What `hub.download` does."""
    monkeypatch.setattr(module.hub, "download_bytes", lambda id: 10)
    monkeypatch.setattr(module.hub, "cached_bytes", lambda id: 5)

    def download(id):
        shutil.copytree(model_folder, home / "models" / id)

    monkeypatch.setattr(module.hub, "download", download)
    return download


def collect(downloads, name):
    async def progress():
        return [each async for each in downloads.download(name)]

    return asyncio.run(asyncio.wait_for(progress(), 10))


def test_of_the_hub(downloads, arrive, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(module.hub, "download", lambda id: go_on.wait(10) and arrive(id))

    async def both():
        first = downloads.download("org/name")
        while (progress := await anext(first))[1] is None:
            pass
        await first.aclose()  # the client leaves
        second = downloads.download("org/name")
        assert await anext(second) == progress
        go_on.set()
        return progress, [each async for each in second][-1]

    assert asyncio.run(asyncio.wait_for(both(), 10)) == ((5, 10), (5, 10))  # `arrive` can copy the folder only once
    assert downloads._library.find("name") == "org/name"


def test_of_the_catalog(downloads, monkeypatch):
    def fail(entry, progress):
        with progress(entry, entry.sources[0]) as update:
            update(5)
        raise CheckpointError("the hub can't be reached", "a network connection")

    monkeypatch.setattr(module, "download", fail)
    for _ in range(2):  # a failed download is tried again
        with pytest.raises(ApiError, match=r"the hub can't be reached \(try") as error:
            collect(downloads, "Qwen3-4B:latest")
        assert error.value.status == 502


def test_a_model_that_is_here(downloads, home, model_folder):
    shutil.copytree(model_folder, home / "models" / "qwen3-4b")  # after the library was read
    assert collect(downloads, "small-world") == collect(downloads, "qwen3-4b") == []


def test_other_errors(downloads, arrive, monkeypatch):
    with pytest.raises(ApiError, match="only serves the models of its command line"):
        collect(Downloads(ModelLibrary({"a": "a"})), "qwen3-4b")
    for name in ("qwen3-4", "/etc", "../x", ""):
        with pytest.raises(ApiError, match=r"not found \(try: ") as error:
            collect(downloads, name)
        assert error.value.status == 404
    with pytest.raises(ApiError, match=r"revision of a model can't be served \(try: org/name"):
        collect(downloads, "org/name@v2")
    monkeypatch.setattr(module.hub, "download", lambda id: None)
    with pytest.raises(ApiError, match="has no weights in safetensors or GGUF"):
        collect(downloads, "org/name")
    monkeypatch.setattr(module.hub, "download", lambda id: {}["id"])
    with pytest.raises(KeyError):
        collect(downloads, "org/name")


def test_with_huggingface_hub(home, model_folder, monkeypatch):
    files = {file.name: file.read_bytes() for file in model_folder.iterdir()}
    hub = FakeHub({**files, "pytorch_model.bin": b"the same weights again"})
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    for name in ("HF_HUB_OFFLINE", "MLXLM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    try:
        with Process() as server:
            lines = httpx.post(server.address + "/api/pull", json={"model": "owner/name"}, timeout=30).text.splitlines()
            models = httpx.get(server.address + "/v1/models").json()["data"]
    finally:
        hub.close()
    assert lines[-1] == '{"status":"success"}', lines
    assert f'"total":{sum(map(len, files.values()))}' in lines[-2]
    assert "owner/name" in [model["id"] for model in models]
