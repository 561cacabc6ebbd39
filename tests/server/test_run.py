"""A real server: clients that leave or are slow, the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from mlxlm.server import request_body, run
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from tests.paths import ROOT
from tests.server.apis import events
from tests.server.conftest import HELLO, running, wait_until

LONG = {**HELLO, "max_tokens": 4000, "temperature": 0}


def raw_connection(address: str, content: bytes = b"") -> socket.socket:
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    connection.sendall(content)
    return connection


def post(body: bytes, *headers: bytes) -> bytes:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def check_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(10) == b""


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_rows(live, served, n):
    with httpx.stream(
        "POST", live + "/v1/chat/completions", json={**LONG, "stream": True, "n": n}, timeout=60
    ) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()  # dropping it would close the response
        next(parts)
        assert served.engine.stats.running == n
    assert wait_until(lambda: served.engine.stats.running == served.engine.stats.waiting == 0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_connection_that_is_closed_frees_its_rows(live, served, n):
    connection = raw_connection(live, post(json.dumps({**LONG, "n": n}).encode()))
    assert wait_until(lambda: served.engine.stats.running == n)
    connection.close()
    assert wait_until(lambda: served.engine.stats.running == served.engine.stats.waiting == 0)


def test_a_full_queue_is_a_429(lm):
    model = ServedModel("tiny", lm, ModelSettings(batch_size=1, max_waiting=1))
    models = Models({"tiny": ""}, model.settings)
    models.add(model)
    with running(make_app(models)) as live:
        url, busy = live + "/v1/chat/completions", post(json.dumps(LONG).encode())
        connections = []
        for count in (1, 2):
            connections.append(raw_connection(live, busy))
            assert wait_until(lambda: model.engine.stats.running + model.engine.stats.waiting == count)  # noqa: B023
        response = httpx.post(url, json=HELLO, timeout=60)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["type"] == "rate_limit_error"
        response = httpx.post(url, json={**HELLO, "n": 2}, timeout=60)
        assert response.status_code == 400 and "at most 1 may wait" in response.json()["error"]["message"]
        for connection in connections:
            connection.close()
        assert wait_until(lambda: model.engine.stats.running + model.engine.stats.waiting == 0)


def test_prompts_are_reported_while_they_are_read(live, monkeypatch, served):
    monkeypatch.setattr("mlxlm.server.reply.KEEP_ALIVE_SECONDS", 0.02)
    body = {"messages": [{"role": "user", "content": "fox " * 1800}], "max_tokens": 2, "stream": True}
    text = httpx.post(live + "/v1/chat/completions", json=body, timeout=60).text
    assert re.search(r"^: reading the prompt, \d+ of \d{4} tokens$", text, re.MULTILINE)
    assert events(text)[-1] == "[DONE]"


def test_many_clients_at_once_get_what_they_get_alone(live):
    async def ask(client, n):
        body = {**HELLO, "max_tokens": 30, "temperature": 1.0, "seed": n, "stream": n % 2 == 0}
        response = await client.post("/v1/chat/completions", json=body)
        if n % 2:
            return response.json()["choices"][0]["message"]["content"]
        parts = [e["choices"][0]["delta"].get("content") or "" for e in events(response.text)[:-1]]
        return "".join(parts)

    async def check():
        async with httpx.AsyncClient(base_url=live, timeout=60) as client:
            together = await asyncio.gather(*(ask(client, n) for n in range(12)))
            assert together == [await ask(client, n) for n in range(12)]

    asyncio.run(check())


def test_idle_connections_are_closed(models):
    with running(make_app(models), idle_timeout=0) as live:
        connection = raw_connection(live, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in read_to_end(connection)  # the server closes it, although HTTP/1.1 keeps it


def test_slow_headers_are_dropped(live, monkeypatch):
    monkeypatch.setattr(run, "HEADER_TIMEOUT", 0.1)
    for content in (b"", b"GET /health HTTP/1.1\r\nHost: lo"):
        connection = raw_connection(live, content)
        check_closed(connection)


def test_a_second_request_on_a_connection_is_dropped_too(live, monkeypatch):
    monkeypatch.setattr(run, "HEADER_TIMEOUT", 0.1)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = raw_connection(live)
    for _ in range(2):
        connection.sendall(request)
        answer = b""
        while b'"ok"' not in answer:
            answer += connection.recv(1000)
    connection.sendall(b"GET /hea")
    check_closed(connection)


def test_slow_bodies_are_dropped(live, monkeypatch):
    monkeypatch.setattr(request_body, "BODY_TIMEOUT", 0.1)
    connection = raw_connection(live, post(b"{" + b" " * 100)[:-50])
    assert b" 408 " in read_to_end(connection)


def test_slow_readers_are_dropped(live, monkeypatch, served):
    monkeypatch.setattr(run, "WRITE_TIMEOUT", 0.2)
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "stream": true, "n": 16,'
    body += b'"logprobs": true, "top_logprobs": 20}'
    parts = urlsplit(live)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((parts.hostname, parts.port))
    connection.sendall(post(body))
    assert wait_until(lambda: served.engine.stats.running == 16)
    assert wait_until(lambda: served.engine.stats.running == 0)
    connection.close()


def test_what_is_not_http_is_a_400(live):
    answer = read_to_end(raw_connection(live, b"hello\r\n\r\n"))
    assert b" 400 " in answer and b'"invalid_request_error"' in answer


def test_large_headers_are_a_400(live):
    header = b"X: " + b"x" * (run.MAX_HEADER_BYTES + 1000)
    answer = read_to_end(raw_connection(live, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + header))
    assert b" 400 " in answer and b'"invalid_request_error"' in answer


def test_a_port_in_use(live):
    with pytest.raises(run.ConfigError, match="cannot listen on"):
        run.bind("127.0.0.1", urlsplit(live).port)


class Process:
    """`mlxlm serve` as a user starts it, with the lines that it prints."""

    def __init__(self, *arguments, last_line="curl"):
        command = [sys.executable, str(ROOT / "cli.py"), "serve", *map(str, arguments), "--port", "0"]
        environment = {**os.environ, "MLXLM_API_KEY": ""}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines = []
        while not self.lines or last_line not in self.lines[-1]:
            line = self.process.stderr.readline()
            assert line, self.lines
            self.lines.append(line)
        self.address = re.search(r"http://[^/]+", self.lines[-1])[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def test_sigterm_lets_a_stream_finish(model_folder):
    with Process(model_folder) as server:
        body = {**HELLO, "max_tokens": 600, "temperature": 0, "stream": True}
        with httpx.stream("POST", server.address + "/v1/chat/completions", json=body, timeout=60) as response:
            parts = response.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert events(text)[-1] == "[DONE]" and events(text)[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.address + "/health")


@contextlib.contextmanager
def long_stream(server):
    """The parts of a stream that has begun and takes long."""
    with httpx.stream(
        "POST", server.address + "/v1/chat/completions", json={**LONG, "stream": True}, timeout=60
    ) as response:
        parts = response.iter_text()
        next(parts)
        yield parts


def test_a_second_signal_ends_at_once(model_folder):
    with Process(model_folder, "--log-format", "json", last_line="Serving") as server, long_stream(server):
        server.process.send_signal(signal.SIGINT)
        server.lines.append(server.process.stderr.readline())
        while "stopping" not in server.lines[-1]:
            server.lines.append(server.process.stderr.readline())
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130
        assert all(json.loads(line) for line in [*server.lines, *server.process.stderr])


def test_the_time_to_finish_is_limited(model_folder):
    with Process(model_folder, "--shutdown-timeout", "1") as server, long_stream(server) as parts:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, server.address + "/v1/chat/completions", json=LONG, timeout=60)
            running = 'mlxlm_running{model="tiny"} 2.0'
            assert wait_until(lambda: running in httpx.get(server.address + "/metrics", timeout=60).text)
            server.process.send_signal(signal.SIGINT)
            text = "".join(parts)
            assert events(text)[-1]["error"]["message"] == "the server is stopping"
            assert waiting.result().status_code == 503
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.process.stderr.read()


def test_the_prefix_cache_survives_a_restart(model_folder, tmp_path):
    body = {"messages": [{"role": "user", "content": "fox " * 400}], "max_tokens": 2}
    for seen_before in (False, True):
        with Process(model_folder, "--prefix-cache-dir", str(tmp_path / "prompts")) as server:
            usage = httpx.post(server.address + "/v1/chat/completions", json=body, timeout=60).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 300) == seen_before
            server.process.terminate()
            assert server.process.wait(60) == 0
