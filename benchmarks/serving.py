"""Helpers of the benchmarks of the server: a model to serve, server processes, requests whose chunks are timed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

ROOT = Path(__file__).parents[1]
START_SECONDS = 120  # that a server may take to answer its first request
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_model(folder: Path, **changes: Any) -> Path:
    """Write a Llama with random weights, 26M without its embeddings; `changes` are fields of its ModelConfig.

    Greedy answers have only words: they don't end by themselves, and none begins with spaces, which a server may hold
    back.
    """
    from mlx.utils import tree_flatten

    from mlxlm import tokenizer
    from mlxlm.backend.mlx import mx
    from mlxlm.checkpoint import save_weights
    from mlxlm.config import ModelConfig
    from mlxlm.families import config_to_hf
    from mlxlm.model import Decoder
    from mlxlm.utils.json_files import write_json

    config = ModelConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=24_576, max_position_embeddings=8192, tie_word_embeddings=True,
    ).with_changes(**changes)  # fmt: skip
    letters = random.Random(0)
    words = ["".join(letters.choices(string.ascii_lowercase, k=letters.randint(3, 7))) for _ in range(26_000)]
    tokens = tokenizer.train([" ".join(words)] * 2, config.vocab_size)
    tokens.chat_template = TEMPLATE
    model = Decoder(config)
    model.init_weights(0)
    no_words = [n for n in range(config.vocab_size) if not re.fullmatch(rb" ?[a-z]+", tokens.token_bytes(n))]
    model.model.embed_tokens.weight[mx.array(no_words)] = 0  # and so are their logits
    folder.mkdir()
    save_weights(folder, dict(tree_flatten(model.parameters())))
    write_json(folder / "config.json", config_to_hf(config))
    tokens.save(folder)
    return folder


class Texts:
    """Random words for prompts, which no two prompts share.

    Attributes:
        special_ids: The special tokens; without them an answer doesn't end by itself.
    """

    def __init__(self, model: Path, seed: int = 0):
        """Take the words from the tokens of a model."""
        from mlxlm import tokenizer

        self._tokenizer = tokenizer.load(model)
        ids = range(self._tokenizer.vocab_size)
        self._ids = [n for n in ids if re.fullmatch(rb" [a-zA-Z]+", self._tokenizer.token_bytes(n))]
        self.special_ids = [n for n in ids if not self._tokenizer.token_bytes(n)]
        self._random = random.Random(seed)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    def __call__(self, num_tokens: int) -> str:
        """A text of about `num_tokens` tokens."""
        return self._tokenizer.decode(self._random.choices(self._ids, k=num_tokens)).strip()


@dataclass
class Peer:
    """A server to measure.

    Attributes:
        name: What the table calls it.
        command: The command that serves a model folder on a port.
    """

    name: str
    command: Callable[[Path, int], list[str]]


def serve_command(model: Path, port: int, *options: str) -> list[str]:
    """The command of mlxlm's server."""
    arguments = [str(model), "--port", str(port), "--log-level", "warning", *options]
    return [sys.executable, str(ROOT / "cli.py"), "serve", *arguments]


class Server:
    """A running server.

    Attributes:
        url: Its address.
        process: The process.
        memory: Its resident bytes, 20 times a second while `watch_memory` ran.
    """

    def __init__(self, url: str, process: subprocess.Popen, log: IO[bytes]):
        self.url, self.process, self._log = url, psutil.Process(process.pid), log
        self.memory: list[float] = []

    def log(self) -> str:
        """What it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    async def watch_memory(self) -> None:
        """Append to `memory`, until it is cancelled."""
        while True:
            self.memory.append(self.process.memory_info().rss)
            await asyncio.sleep(0.05)


@contextmanager
def serving(command: Callable[[Path, int], list[str]], model: Path) -> Iterator[Server]:
    """Run a server of `model`, on a free port, until it has answered a request."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(model, port), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}", process, log)
            body = {"prompt": "a", "max_tokens": 1}
            end = time.monotonic() + START_SECONDS
            while True:
                try:
                    httpx.post(f"{server.url}/v1/completions", json=body, timeout=START_SECONDS).raise_for_status()
                    break
                except httpx.HTTPError as error:
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise SystemExit(f"no server ({error}): {log.read().decode()[-2000:]}") from None
                    time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class Answer:
    """A streamed answer.

    Attributes:
        start: When the request was sent, in seconds.
        times: When each chunk of text came.
        text: The text.
        num_tokens: Its tokens.
        num_refused: How often the server closed the connection without a response; the request was then repeated.
    """

    start: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    num_refused: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first chunk of text."""
        return self.times[0] - self.start


class Client:
    """Streams answers of a server.

    Args:
        http: The connection.
        texts: For the model's special tokens, and whether it has a chat template; else its messages are the prompt.
    """

    def __init__(self, http: httpx.AsyncClient, texts: Texts):
        self._http, self._chat = http, texts.has_template
        self._logit_bias = {str(n): -100 for n in texts.special_ids}

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, answer: Answer | None = None) -> Answer:
        """Stream an answer to its end. `answer` can be read while it grows."""
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "logit_bias": self._logit_bias}
        if self._chat:
            path, body["messages"] = "/v1/chat/completions", messages
        else:
            path, body["prompt"] = "/v1/completions", "\n".join(message["content"] for message in messages)
        answer = answer or Answer(time.perf_counter())
        while True:
            try:
                await self._read(path, body, answer)
                return answer
            except httpx.NetworkError:  # a short queue of connections, as that of Python's http.server
                if answer.times or time.perf_counter() - answer.start > START_SECONDS:
                    raise
                answer.num_refused += 1
                await asyncio.sleep(0.02)

    async def _read(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        num_chunks = 0
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{path}: {response.status_code} {(await response.aread()).decode()[:500]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise SystemExit(f"{path}: {event}")
                for choice in event["choices"]:
                    if text := choice["delta"].get("content") if self._chat else choice["text"]:
                        answer.times.append(time.perf_counter())
                        answer.text += text
                        num_chunks += 1
                answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", num_chunks)
        if not answer.times:
            raise SystemExit(f"{path}: an answer without text")
