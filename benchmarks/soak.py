"""Many clients with random requests for some minutes: `mlxlm serve` must answer all, and keep nothing of them.

    python benchmarks/soak.py [--minutes 10] [--clients 32] [--seed 0] [--model DIR]

Requests are streamed or not, constrained, with tools, to several endpoints, or wrong; some clients leave in the middle.
Prints a line per minute, with the median of the resident memory. Exits with 1 if a status is unexpected, if
that median grows by more than 10% after the second minute, or if texts or file descriptors are left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import median, report
from serving import Server, Texts, make_model, serve_command, serving

MAX_GROWTH = 1.1
CACHE = "--prefix-cache-bytes", "64MB"  # full before the second minute
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rome"]}}, "required": ["city"]},
}
LEFT = "left"


@dataclass
class Counts:
    """What has happened.

    Attributes:
        statuses: How often each status was received, or the client left.
        tokens: Tokens of complete answers.
        problems: Unexpected responses.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="model folder in the Hugging Face layout, with a chat template")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = (options.model or make_model(Path(folder, "model"))).resolve()
        with serving(lambda *where: serve_command(*where, *CACHE), model) as server:
            problems = asyncio.run(soak(server, Texts(model, options.seed), options))
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if problems else 0)


async def soak(server: Server, texts: Texts, options: argparse.Namespace) -> list[str]:
    """Send requests, and return what was wrong."""
    counts, memory = Counts(), []
    start = time.monotonic()
    end = start + 60 * options.minutes
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await metrics(http)  # one connection that stays open, before the descriptors are counted
        descriptors = server.process.num_fds()
        rng = random.Random(options.seed)
        clients = [asyncio.create_task(use(server.url, texts, rng, counts, end)) for _ in range(options.clients)]
        minute, tokens = 0, 0
        watching = asyncio.create_task(server.watch_memory())
        while minute < options.minutes:
            minute += 1
            await asyncio.sleep(max(0, min(start + 60 * minute, end) - time.monotonic()))
            values = await metrics(http)
            memory.append(median(server.memory))
            server.memory.clear()
            statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.statuses.items()))
            print(
                f"minute {minute}: {counts.statuses.total()} requests ({statuses}), "
                f"{(counts.tokens - tokens) / 60:.0f} tokens/s, {memory[-1] / 1e6:.0f} MB, "
                f"{server.process.num_fds()} descriptors, {values['running']:.0f} running, "
                f"{values['waiting']:.0f} waiting",
                file=sys.stderr,
            )
            tokens = counts.tokens
        await asyncio.gather(*clients)
        watching.cancel()
        problems = list(counts.problems)
        for _ in range(100):  # connections are closed within seconds
            values, left = await metrics(http), server.process.num_fds() - descriptors
            if values["running"] == values["waiting"] == 0 and left <= 0:
                break
            await asyncio.sleep(0.2)
    if values["running"] or values["waiting"]:
        problems.append(f"texts are left: {values['running']:.0f} running, {values['waiting']:.0f} waiting")
    if left > 0:
        problems.append(f"{left} file descriptors are left")
    growth = memory[-1] / memory[1] if len(memory) > 2 else None
    if growth is not None and growth > MAX_GROWTH:
        problems.append(f"memory has grown to {growth:.2f} times that of minute 2")
    rows = [
        ("requests", f"{counts.statuses.total():,}: {dict(sorted(counts.statuses.items()))}"),
        ("tokens of complete answers", f"{counts.tokens:,}"),
        ("memory in each minute, MB", ", ".join(f"{value / 1e6:.0f}" for value in memory)),
        ("memory in the last minute / in minute 2", "not measured" if growth is None else f"{growth:.3f}"),
        ("problems", str(len(problems))),
    ]
    result = {
        "benchmark": "soak", "minutes": options.minutes, "statuses": counts.statuses, "tokens": counts.tokens,
        "memory": memory, "growth": growth, "problems": problems,
    }  # fmt: skip
    report(f"{options.clients} clients for {options.minutes:g} minutes", rows, result)
    return problems


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """The numbers of running and waiting texts."""
    text = (await http.get("/metrics")).raise_for_status().text
    return {name: float(re.search(rf"^mlxlm_{name}{{.*}} (\S+)$", text, re.M)[1]) for name in ("running", "waiting")}


async def use(url: str, texts: Texts, rng: random.Random, counts: Counts, end: float) -> None:
    """Send one request after another until `end`, on connections that last for some of them."""
    while time.monotonic() < end:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            for _ in range(rng.randint(1, 10)):
                if time.monotonic() < end:
                    await send(http, *random_request(texts, rng), counts, rng)


async def send(
    http: httpx.AsyncClient, path: str, body: Any, expected: int, counts: Counts, rng: random.Random
) -> None:
    """Send a request, and leave in the middle of one in four."""
    seconds = rng.uniform(0, 3) if rng.random() < 0.25 else None
    try:
        async with asyncio.timeout(seconds):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with http.stream("POST", path, content=content) as response:
                text = (await response.aread()).decode()
    except TimeoutError:
        counts.statuses[LEFT] += 1
        return
    except httpx.HTTPError as error:
        counts.statuses["no response"] += 1
        counts.problems.append(f"{path}: {error!r}")
        return
    status = response.status_code
    counts.statuses[str(status)] += 1
    if status != expected or status == 200 and re.search(r'^(data: )?{"error"', text, re.M):
        counts.problems.append(f"{path}: {status} instead of {expected}: {text[:300]} to {content[:300]!r}")
    elif used := re.findall(r'"(?:completion|output)_tokens":(\d+)', text):
        counts.tokens += int(used[-1])


def random_request(texts: Texts, rng: random.Random) -> tuple[str, Any, int]:
    """An endpoint, a body, and the status that it should get."""
    messages = [{"role": "user", "content": texts(rng.choice([5, 30, 30, 300]))}]
    limit = {"max_tokens": rng.choice([1, 8, 32, 32, 100])}
    chat = {"messages": messages, **limit, "temperature": rng.choice([0, 1]), "stream": rng.random() < 0.6}
    if chat["stream"]:
        chat["stream_options"] = {"include_usage": True}
    tool = {"type": "function", "function": WEATHER}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    path, constrained = "/v1/chat/completions", rng.choice([{"regex": "(ab|cd){3,20}"}, {"json_schema": schema}])
    wrong: list[tuple[str, Any, int]] = [
        (path, {**chat, "temperature": -1}, 400), (path, {**chat, "regex": "("}, 400), (path, b'{"messages": [', 400),
        (path, {**chat, "model": "other"}, 404), ("/v1/nothing", {}, 404), (path, {**chat, "nothing": 1}, 400),
        ("/v1/completions", {"prompt": [10**9]}, 400), (path, {**chat, "messages": []}, 400),
    ]  # fmt: skip
    kinds: list[tuple[int, list[tuple[str, Any, int]]]] = [
        (10, [(path, chat, 200)]),
        (2, [(path, {**chat, "n": 3}, 200)]),
        (3, [(path, {**chat, **constrained}, 200)]),
        (2, [(path, {**chat, "tools": [tool], "tool_choice": "required"}, 200)]),
        (2, [("/v1/completions", {"prompt": texts(20), **limit}, 200)]),
        (1, [("/v1/responses", {"input": texts(20), "max_output_tokens": 16}, 200)]),
        (1, [("/v1/messages", {"messages": messages, **limit, "stream": chat["stream"]}, 200)]),
        (1, [("/v1/embeddings", {"input": texts(20)}, 200), ("/tokenize", {"prompt": texts(20)}, 200)]),
        (3, wrong),
    ]
    [choices] = rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
    return rng.choice(choices)


if __name__ == "__main__":
    main()
