"""Random requests at once, some of which leave: whoever stays gets what the request gives alone, and nothing is left.

MLXLM_RANDOM_REQUESTS sets the number of requests, MLXLM_RANDOM_SEED which ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import httpx

from mlxlm.backend.mlx import tree_flatten
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from tests.server.conftest import running, wait_until
from tests.server.test_tools import NAMED, WEATHER

COUNT = int(os.environ.get("MLXLM_RANDOM_REQUESTS", "60"))
SEED = int(os.environ.get("MLXLM_RANDOM_SEED", "0"))
CLIENTS = 16
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "how", "are", "you", "today", "Grüße", "世界"]
SHARED = "You are " + "quick brown fox " * 40
ROOM = 500_000  # bytes of keys and values: for any of the texts, but not for six, so that some are interrupted


def serve(lm, **settings):
    model = ServedModel("tiny", lm, ModelSettings(**settings))
    models = Models({"tiny": "unused"}, model.settings)
    models.add(model)
    return model, make_app(models)


def random_body(rng: random.Random) -> tuple[str, dict]:
    """An endpoint and a request without `stream`."""

    def text():
        return " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 20, 60])))

    body: dict = {"max_tokens": rng.choice([1, 2, 10, 10, 40, 40, 80, 500]), "temperature": rng.choice([0, 0.7, 1.5])}
    body["seed"] = rng.randrange(1000)
    body |= rng.choice(
        [{}, {}, {}, {"n": 3}, {"top_k": 5, "min_p": 0.05}, {"stop": ["e", "世"]}, {"repetition_penalty": 1.3},
         {"presence_penalty": 0.5, "dry_multiplier": 0.8}, {"logit_bias": {"20": 5}}]
    )  # fmt: skip
    body |= rng.choice(
        [{}, {}, {}, {"regex": "(ab|cd){3,9}"}, {"choice": ["yes", "no", "maybe"]},
         {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
    )  # fmt: skip
    if rng.random() < 0.3:
        return "/v1/completions", {**body, "prompt": text()}
    messages = [{"role": "system", "content": SHARED}] if rng.random() < 0.5 else []
    for _ in range(rng.choice([0, 0, 1, 2])):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    body["messages"] = [*messages, {"role": "user", "content": text()}]
    wrong = {"temperature": -1}, {"regex": "("}, {"nothing": 1}, {"max_tokens": 0}, {"model": "other"}
    tools = {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 60, "temperature": 0}
    if rng.random() < 0.2:
        body = {key: body[key] for key in ("messages", "seed")} | rng.choice([*wrong, tools, tools])
    return "/v1/chat/completions", body


def add_choices(texts: dict[int, list], event: dict) -> None:
    """Add the choices of a response or an event: {index: [text, arguments of calls, finish_reason]}."""
    for choice in event["choices"]:
        part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        text = texts.setdefault(choice["index"], ["", "", None])
        text[0] += part.get("content") or ""
        text[1] += "".join(call["function"]["arguments"] for call in part.get("tool_calls") or ())
        text[2] = choice["finish_reason"] or text[2]


async def ask(
    client: httpx.AsyncClient, path: str, body: dict, texts: dict[int, list], most_events: int = 10**6
) -> int:
    """Send a request, add the answer to `texts` as it comes, and leave after some events. Returns the status."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200 or not body.get("stream"):
            content = json.loads(await response.aread())
            if response.status_code == 200:
                add_choices(texts, content)
            return response.status_code
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return 200
            if line.startswith("data: "):
                add_choices(texts, json.loads(line.removeprefix("data: ")))
                most_events -= 1
            if not most_events:
                return 200
    raise AssertionError("the stream ended without [DONE]")


async def run_together(address: str, requests: list) -> list:
    """The status and texts of each request, `CLIENTS` of them at a time."""
    limit = asyncio.Semaphore(CLIENTS)

    async def run(client, path, body, most_events, seconds):
        texts, status = {}, None
        async with limit:
            try:
                async with asyncio.timeout(seconds):
                    status = await ask(client, path, body, texts, most_events or 10**6)
            except TimeoutError:
                pass
        return status, texts

    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        return await asyncio.gather(*(run(client, *request) for request in requests))


async def run_alone(address: str, requests: list) -> list:
    """The same one after another, to the end."""
    answers = []
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        for path, body, *_ in requests:
            texts: dict = {}
            answers.append((await ask(client, path, {**body, "stream": False}, texts), texts))
    return answers


def test_random_mixes(lm):
    rng = random.Random(SEED)
    requests = []
    for _ in range(COUNT):
        path, body = random_body(rng)
        stream = rng.random() < 0.6
        most_events = rng.randint(1, 20) if stream and rng.random() < 0.3 else None
        seconds = rng.choice([0.01, 0.1, 0.5]) if rng.random() < 0.2 else None
        requests.append((path, {**body, "stream": stream}, most_events, seconds))
    weights = sum(weight.nbytes for _, weight in tree_flatten(lm.model.parameters()))
    model, app = serve(lm, batch_size=6, max_memory=weights + ROOM)
    with running(app) as address:
        answers = asyncio.run(run_together(address, requests))
        assert wait_until(lambda: model.engine.stats.running == model.engine.stats.waiting == 0, 5)
        assert wait_until(lambda: model.engine.stats.kv_bytes == 0)
    _, app = serve(lm, batch_size=1, prefix_cache_bytes=0)
    with running(app) as address:
        alone = asyncio.run(run_alone(address, requests))
    complete = 0
    for (path, body, most_events, seconds), (status, texts), (expected_status, expected) in zip(
        requests, answers, alone, strict=True
    ):
        assert status == expected_status or (status is None and seconds), (path, body)
        if status == 200 and not most_events:
            complete += 1
            assert texts == expected, (path, body)
        for index, (text, arguments, _) in texts.items():
            assert expected[index][0].startswith(text) and expected[index][1].startswith(arguments), (path, body)
    assert complete > COUNT / 4
