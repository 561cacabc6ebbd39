"""LM Studio's lists of models, and OpenAI's endpoints under /api/v0."""

from __future__ import annotations

import shutil

from starlette.testclient import TestClient

from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings
from tests.server.conftest import CONTEXT, HELLO


def test_models(model_folder):
    with TestClient(make_app(Models({"org/tiny": str(model_folder)}, ModelSettings()))) as client:
        [model] = client.get("/api/v0/models").json()["data"]
        assert model == client.get("/api/v0/models/org/tiny").json()
        assert (model["id"], model["publisher"], model["state"]) == ("org/tiny", "org", "not-loaded")
        assert model["max_context_length"] == CONTEXT and model["compatibility_type"] == "mlx"
        [newer] = client.get("/api/v1/models").json()["models"]
        assert (newer["key"], newer["display_name"], newer["loaded_instances"]) == ("org/tiny", "tiny", [])
        assert newer["size_bytes"] == (model_folder / "model.safetensors").stat().st_size
        assert 0 < newer["quantization"]["bits_per_weight"] < 40
        client.post("/api/v0/chat/completions", json={**HELLO, "max_tokens": 1})
        assert client.get("/api/v0/models").json()["data"][0]["state"] == "loaded"
        assert client.get("/api/v1/models").json()["models"][0]["loaded_instances"][0]["id"] == "org/tiny"
        missing = client.get("/api/v0/models/nothing")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_an_embedding_model(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "tiny")
    (folder / "modules.json").write_text('[{"type": "Transformer"}, {"type": "Normalize"}]')
    with TestClient(make_app(Models({"tiny": str(folder)}, ModelSettings()))) as client:
        assert client.get("/api/v0/models").json()["data"][0]["type"] == "embeddings"
        assert client.get("/api/v1/models").json()["models"][0]["type"] == "embedding"
        assert client.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["embedding"]


def test_openais_endpoints(client):
    chat = client.post("/api/v0/chat/completions", json={**HELLO, "max_tokens": 2}).json()
    assert chat["usage"]["completion_tokens"] == 2
    assert client.post("/api/v0/completions", json={"prompt": "a", "max_tokens": 2}).json()["choices"]
    assert client.post("/api/v0/embeddings", json={"input": "a"}).json()["data"]
