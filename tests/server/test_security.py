"""Who may use the server."""

from __future__ import annotations

import logging

import pytest
from starlette.testclient import TestClient

from mlxlm.server.app import make_app
from mlxlm.server.security import AccessRules


def client_with(models, *, host="127.0.0.1", keys=(), hosts=(), origins=(), base="http://127.0.0.1:8080"):
    return TestClient(make_app(models, AccessRules.for_host(host, keys, hosts, origins)), base_url=base)


@pytest.mark.parametrize("name", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:99", "localhost"])
def test_names_of_this_machine(models, name):
    assert client_with(models).get("/v1/models", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "localhost.evil.example:8080", "127.0.0.1.nip.io", "192.168.1.7", "127.0.0.2", "[::2]", ""]
)
def test_other_names_are_refused(models, name):
    response = client_with(models).get("/v1/models", headers={"host": name})
    assert response.status_code == 403 and "allowed-host" in response.json()["error"]["message"]


def test_allowed_host(models):
    client = client_with(models, hosts=["Box.local"])
    assert client.get("/v1/models", headers={"host": "box.local:8080"}).status_code == 200
    assert client.get("/v1/models", headers={"host": "other.local"}).status_code == 403


def test_without_a_key_other_machines_use_an_address(models):
    client = client_with(models, host="0.0.0.0", hosts=["box.local"])
    assert client.get("/v1/models", headers={"host": "192.168.1.7:8080"}).status_code == 200
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    with_key = client_with(models, host="0.0.0.0", keys=["k"])
    assert with_key.get("/health", headers={"host": "any.example"}).status_code == 200


def test_api_key(models, caplog):
    client = client_with(models, keys=["right-key", "other-key"])
    with caplog.at_level(logging.DEBUG):
        response = client.get("/v1/models")
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        for wrong in ("Bearer wrong-key", "Bearer", "right-key", "Bearer right-key2", "Bearer \xff"):
            assert client.get("/v1/models", headers={"authorization": wrong.encode("latin-1")}).status_code == 401
        for right in (
            {"authorization": "Bearer right-key"},
            {"authorization": "bearer other-key"},
            {"x-api-key": "right-key"},
        ):
            assert client.get("/v1/models", headers=right).status_code == 200
    assert "key" not in caplog.text
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 401


def test_web_pages_of_others_are_refused(models):
    client = client_with(models)
    for origin in ("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:9090", "http://[::"):
        response = client.post("/tokenize", json={"prompt": "a"}, headers={"origin": origin})
        assert response.status_code == 403 and "access-control-allow-origin" not in response.headers
    own = {"origin": "http://127.0.0.1:8080"}
    assert client.post("/tokenize", json={"prompt": "a"}, headers=own).status_code == 200


def test_cors_origin(models):
    client = client_with(models, origins=["https://app.example"], keys=["k"])
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = client.options(
        "/v1/chat/completions", headers={**headers, "access-control-request-headers": "authorization,content-type"}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    refused = client.get("/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"
    evil = client.get("/v1/models", headers={"origin": "https://evil.example", "authorization": "Bearer k"})
    assert evil.status_code == 403 and "access-control-allow-origin" not in evil.headers


def test_any_origin(models):
    client = client_with(models, origins=["*"])
    response = client.get("/v1/models", headers={"origin": "https://app.example"})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
