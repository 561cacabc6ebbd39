"""Models, health and metrics."""

from __future__ import annotations

import json
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from mlxlm.generation import EngineStats
from mlxlm.server.errors import request_id
from mlxlm.server.logs import JSONFormatter
from mlxlm.server.metrics import Metrics
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
    client.get("/v1/models/tiny")
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert lines['mlxlm_requests_total{endpoint="/v1/chat/completions",status="200"}'] == "1.0"
    assert lines['mlxlm_requests_total{endpoint="/v1/chat/completions",status="400"}'] == "1.0"
    assert lines['mlxlm_requests_total{endpoint="other",status="404"}'] == "1.0"
    assert lines['mlxlm_generated_tokens_total{model="tiny"}'] == "7.0"
    assert float(lines['mlxlm_prompt_tokens_total{model="tiny"}']) > 5
    assert lines['mlxlm_time_to_first_token_seconds_count{model="tiny"}'] == "1.0"
    assert lines['mlxlm_running{model="tiny"}'] == lines['mlxlm_waiting{model="tiny"}'] == "0.0"
    for name in ('request_duration_seconds_count{endpoint="/v1/chat/completions",', "queue_seconds_count{"):
        assert lines[f'mlxlm_{name}model="tiny"}}'] == "1.0"
    assert lines['mlxlm_inter_token_seconds_count{model="tiny"}'] == "6.0"
    assert lines['mlxlm_request_duration_seconds_count{endpoint="/v1/models/{id}",model=""}'] == "1.0"
    assert lines['mlxlm_request_duration_seconds_count{endpoint="other",model=""}'] == "1.0"
    assert float(lines["mlxlm_process_resident_memory_bytes"]) > 1e6
    assert {'mlxlm_kv_bytes{model="tiny"}', 'mlxlm_prefix_cache_bytes{model="tiny"}'} <= set(lines)
    assert 'mlxlm_cached_tokens_total{model="tiny"}' in lines


def test_log_lines_in_json(client, caplog):
    formatter = JSONFormatter()
    with caplog.at_level(logging.DEBUG, "mlxlm.server"):
        client.post("/v1/chat/completions", json={**HELLO, "max_tokens": 2}, headers={"x-request-id": "mine"})
    line = json.loads(formatter.format(caplog.records[-1]))
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["model"] == "tiny" and line["seconds"] > 0 and line["level"] == "info"
    token = request_id.set("req_1")
    try:
        raise ValueError("on\ntwo lines")
    except ValueError:
        record = logging.LogRecord("mlxlm", logging.ERROR, "", 1, "failed: %s", ("é",), sys.exc_info())
    formatted = formatter.format(record)
    request_id.reset(token)
    assert "\n" not in formatted
    assert json.loads(formatted)["request_id"] == "req_1" and "two lines" in json.loads(formatted)["exception"]


def test_gauges_of_an_engine():
    stats = EngineStats(1, 2, 3, generated_tokens=0, prompt_tokens=0, cached_tokens=0, kv_bytes=4, prefix_cache_bytes=5)
    models = SimpleNamespace(loaded=[SimpleNamespace(name="m", engine=SimpleNamespace(stats=stats), load_seconds=2.5)])
    text = generate_latest(Metrics(models).registry).decode()
    found = dict(re.findall(r'^mlxlm_(\w+){model="m"} (\S+)$', text, re.M))
    names = ("running", "waiting", "paused", "kv_bytes", "prefix_cache_bytes")
    assert found == {**{name: f"{value}.0" for value, name in enumerate(names, 1)}, "model_load_seconds": "2.5"}
