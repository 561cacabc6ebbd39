"""Models, health and metrics."""

from __future__ import annotations

import logging
import re
import shutil
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from starlette.testclient import TestClient

from mlxlm.checkpoint.local_models import folder_models
from mlxlm.generation import EngineStats, GenerationConfig
from mlxlm.server import model_library
from mlxlm.server.app import make_app
from mlxlm.server.metrics import Metrics
from mlxlm.server.models import Models, ModelSettings
from tests.server.conftest import CONTEXT, HELLO


def test_models(client):
    [model] = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["object"] == "model"
    assert model["loaded"] is True and model["context_length"] == CONTEXT
    assert client.get("/v1/models/tiny").json() == model == client.get("/models/tiny").json()
    missing = client.get("/v1/models/big/one")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_health(client):
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("given", "echoed"), [("my-id.1", True), ("", False), ("x" * 129, False), ("a b", False), ("\x1b[31m", False)]
)
def test_every_response_and_log_line_has_a_request_id(client, caplog, given, echoed):
    with caplog.at_level(logging.DEBUG, "mlxlm.server"):
        for path in ("/health", "/page/main.js", "/nothing"):
            id = client.get(path, headers={"x-request-id": given}).headers["x-request-id"]
            assert id == given if echoed else re.fullmatch("req_[0-9a-f]{24}", id)
            assert caplog.messages[-1].endswith(f", {id}")


def test_metrics(client):
    client.post("/v1/chat/completions", json={**HELLO, "max_tokens": 7})
    client.post("/v1/chat/completions", json={})
    client.get("/nothing/of/this")
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert lines['mlxlm_requests_total{endpoint="/v1/chat/completions",status="200"}'] == "1.0"
    assert lines['mlxlm_requests_total{endpoint="/v1/chat/completions",status="400"}'] == "1.0"
    assert lines['mlxlm_requests_total{endpoint="other",status="404"}'] == "1.0"
    assert lines['mlxlm_generated_tokens_total{model="tiny"}'] == "7.0"
    assert float(lines['mlxlm_prompt_tokens_total{model="tiny"}']) > 5
    assert lines['mlxlm_time_to_first_token_seconds_count{model="tiny"}'] == "1.0"
    assert lines['mlxlm_running{model="tiny"}'] == lines['mlxlm_waiting{model="tiny"}'] == "0.0"
    assert float(lines["mlxlm_process_resident_memory_bytes"]) > 1e6
    assert {'mlxlm_kv_bytes{model="tiny"}', 'mlxlm_prefix_cache_bytes{model="tiny"}'} <= set(lines)
    assert 'mlxlm_cached_tokens_total{model="tiny"}' in lines


def test_gauges_of_an_engine():
    stats = EngineStats(1, 2, 3, generated_tokens=0, prompt_tokens=0, cached_tokens=0, kv_bytes=4, prefix_cache_bytes=5)
    models = SimpleNamespace(loaded=[SimpleNamespace(name="m", engine=SimpleNamespace(stats=stats))])
    text = generate_latest(Metrics(models).registry).decode()
    found = dict(re.findall(r'^mlxlm_(\w+){model="m"} (\S+)$', text, re.M))
    names = ("running", "waiting", "paused", "kv_bytes", "prefix_cache_bytes")
    assert found == {name: f"{value}.0" for value, name in enumerate(names, 1)}


def test_example_prompts_and_the_catalog(model_folder, tmp_path, monkeypatch):
    shutil.copytree(model_folder, tmp_path / "tiny")
    GenerationConfig(example_prompt="Count to 3.").write(tmp_path / "tiny")
    monkeypatch.setattr(
        model_library, "all_models", lambda folders: list(folder_models(*folders))
    )  # without those of this machine

    def get(models, path):
        return TestClient(make_app(models)).get(path).json()["data"]

    everything = Models({}, ModelSettings(models_dirs=(tmp_path,)))
    assert [model["example_prompt"] for model in get(everything, "/v1/models")] == ["Count to 3."]
    entries = {entry["id"]: entry for entry in get(everything, "/v1/catalog")}
    assert entries["smollm2-135m"]["size"] == 98362432 and "simple questions" in entries["smollm2-135m"]["description"]
    (tmp_path / "tiny").rename(tmp_path / "smollm2-135m")
    assert "smollm2-135m" not in {entry["id"] for entry in get(everything, "/v1/catalog")}  # is here
    given = Models({"tiny": str(tmp_path / "smollm2-135m")}, ModelSettings())
    assert get(given, "/v1/catalog") == []  # downloads nothing
