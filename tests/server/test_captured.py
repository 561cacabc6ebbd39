"""Requests of real clients, as `benchmarks/clients.py` has captured them, are accepted."""

from __future__ import annotations

import json

import httpx
import pytest

from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings
from tests.paths import ROOT
from tests.server.conftest import running

FILES = sorted((ROOT / "tests/server/captured").glob("*.json"))
REFUSED = {"lm-studio /llm": "LM Studio's own client speaks WebSocket, and this server HTTP alone"}


@pytest.fixture
def server(model_folder):
    """The address of a server that loads and unloads the tiny model as it is asked to."""
    with running(make_app(Models({"tiny": str(model_folder)}, ModelSettings()))) as address:
        yield address


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_requests_of_a_client(path, server):
    requests = json.loads(path.read_text(encoding="utf-8"))
    statuses, response_id = {}, None
    with httpx.Client(base_url=server, timeout=60) as http:
        for n, request in enumerate(requests):
            body = request["body"]
            if body and "previous_response_id" in body:
                body["previous_response_id"] = response_id
            content = json.dumps(body).encode() if body else b""
            with http.stream(
                request["method"], request["path"], content=content, headers=request["headers"]
            ) as response:
                if response.status_code != 200 or not (body or {}).get("stream"):  # a stream is left at its start
                    response.read()
            refused = REFUSED.get(f"{path.stem} {request['path']}")
            if (response.status_code == 200) == bool(refused):
                statuses[f"{n}: {request['method']} {request['path']}"] = (response.status_code, response.text)
            if body and request["path"].startswith("/v1/responses") and not body.get("stream"):
                response_id = response.json()["id"]
    assert not statuses
