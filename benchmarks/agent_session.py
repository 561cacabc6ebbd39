"""Agents at work: sessions of many turns at once, with tool calls, edits of earlier messages and disconnects.

    python benchmarks/agent_session.py [MODEL] [--turns 100] [--clients 4] [--max-memory GB] [--checked 40]

Prints which share of the reusable prompt tokens came from the prefix cache. Reusable is what a prompt shares with the
longest earlier text of any client that had ended by then: its prompt, if the model has read it, and its answer but for
the last token. Also the memory of the process compared with --max-memory, and whether greedy answers are
those of the same prompts alone, without a prefix cache. Exits with 1 if one of the three is not as promised.

The server runs in this process, so that token ids can be compared; the clients use it over HTTP. Without MODEL, a Llama
with random weights is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import report
from serving import Texts, make_model

from mlxlm.backend import platform
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation import Engine, Request, load
from mlxlm.server import run
from mlxlm.server.app import make_app
from mlxlm.server.memory import limit_process
from mlxlm.server.models import Models, ModelSettings, ServedModel, load_model
from mlxlm.utils.formatting import human_bytes

GOAL = 0.99  # of the reusable tokens
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
CONTEXT = 32_768
EDIT, COMPACT, LEAVE = 0.1, 0.03, 0.1  # how often a client edits a message, drops old results, disconnects
FILES = ["notes.txt", "main.py", "README.md"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": FILES}, "line": {"enum": list(range(20))}},
                "required": ["path", "line"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("read_file", "edit_file")
]


@dataclass
class Turn:
    """A text of the engine.

    Attributes:
        request: What the engine was asked for.
        stream: Its text.
        reusable: How many tokens of the prompt an earlier text had.
        known: Its tokens whose keys and values were computed, when it has ended.
    """

    request: Request
    stream: Any
    reusable: int
    known: Sequence[int] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="model with a chat template")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-memory", type=float, default=1.0, metavar="GB")
    parser.add_argument("--checked", type=int, default=40, help="answers to generate again alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**SIZES, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
        path = options.model or make_model(Path(folder, "model"), **sizes)
        limit = int(options.max_memory * 1e9)
        settings = ModelSettings(max_memory=limit, process_bytes=limit_process(limit))
        model = load_model("model", str(path), settings)
        turns = record(model)
        with serving(model, settings) as url:
            memory, counts = asyncio.run(work(url, Texts(path, options.seed), options))
        ended = [turn for turn in turns if turn.known]
        reused = sum(min(turn.stream.result().cached_tokens, turn.reusable) for turn in ended)
        reusable = sum(turn.reusable for turn in ended)
        total = sum(len(turn.request.prompt) for turn in ended)
        for turn in sorted(ended, key=lambda turn: turn.stream.result().cached_tokens - turn.reusable)[:5]:
            result = turn.stream.result()
            print(f"{result.cached_tokens} of {turn.reusable} reusable tokens were cached", file=sys.stderr)
        different, checked = compare(path, ended, options.checked, options.seed)
    rows = [
        ("requests", f"{len(turns)}: {', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}"),
        ("prompt tokens; reusable; cached", f"{total:,}; {reusable:,}; {reused:,}"),
        ("share of the reusable tokens", f"{reused / reusable:.2%}"),
        ("memory of the process, at most", f"{human_bytes(memory)} of {human_bytes(limit)}"),
        ("answers that differ from those alone", f"{different} of {checked}"),
    ]
    result = {"benchmark": "agent_session", "share": reused / reusable, "reusable": reusable, "prompt_tokens": total}
    result |= {"memory": memory, "max_memory": limit, "different": different, "checked": checked}
    report(f"{options.clients} agents, {options.turns} turns each", rows, result)
    raise SystemExit(1 if reused < GOAL * reusable or memory > limit or different else 0)


def record(model: ServedModel) -> list[Turn]:
    """Note every text of an engine. Returns the list, which grows."""
    turns: list[Turn] = []
    submit = model.engine.submit

    def recording(request: Request, **settings: Any) -> Any:
        prompt = request.prompt[:-1]  # the last token has to be read for the first logits
        reusable = max((common_prefix_length(prompt, turn.known) for turn in turns), default=0)
        turn = Turn(request, submit(request, **settings), reusable)
        turns.append(turn)

        def note() -> None:
            if turn.stream.num_generated:
                turn.known = [*request.prompt, *turn.stream.result().tokens[:-1]]

        turn.stream.add_done_callback(note)
        return turn.stream

    model.engine.submit = recording
    return turns


@contextmanager
def serving(model: ServedModel, settings: ModelSettings) -> Iterator[str]:
    """Serve a model in a thread; yields the address."""
    models = Models({model.name: "unused"}, settings)
    models.add(model)
    listener = run.bind("127.0.0.1", 0)
    server = run.make_server(make_app(models), 10)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield run.address_of(listener, "127.0.0.1")
    finally:
        server.should_exit = True
        thread.join()


async def work(url: str, texts: Texts, options: argparse.Namespace) -> tuple[int, Counter[str]]:
    """Run the clients. Returns the largest memory of the process, and what the clients did."""
    memory, counts = 0, Counter[str]()

    async def watch() -> None:
        nonlocal memory
        while True:
            memory = max(memory, platform.process_memory())
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        agents = (
            agent(http, texts, random.Random(options.seed + n), options.turns, counts) for n in range(options.clients)
        )
        await asyncio.gather(*agents)
    watching.cancel()
    return memory, counts


async def agent(http: httpx.AsyncClient, texts: Texts, rng: random.Random, turns: int, counts: Counter[str]) -> None:
    """One session."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": texts(300)}]
    for _ in range(turns):
        if messages[-1].get("tool_calls"):
            calls = messages[-1]["tool_calls"]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": texts(60)} for call in calls]
        else:
            messages.append({"role": "user", "content": texts(20)})
        sent = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if len(sent) > 3 and rng.random() < EDIT:
            counts["edits"] += 1
            del messages[rng.choice(sent[-3:]) :]
            messages.append({"role": "user", "content": texts(20)})
        if rng.random() < COMPACT:
            counts["compactions"] += 1
            for message in messages[: len(messages) // 2]:
                if message["role"] == "tool":
                    message["content"] = "removed"
        choice = rng.choice(["auto", "none", "required"])
        body = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0, "stream": True}
        body["max_tokens"] = 100 if choice == "required" else 24
        while rng.random() < LEAVE:
            counts["disconnects"] += 1
            await ask(http, body, chunks=rng.randrange(8))
        messages.append(await ask(http, body))
        counts["answers"] += 1
        counts["tool calls"] += len(messages[-1].get("tool_calls", ()))


async def ask(http: httpx.AsyncClient, body: dict[str, Any], chunks: int | None = None) -> dict[str, Any]:
    """Stream an answer, and return it as a message. Leaves after `chunks` of it."""
    content, calls = "", dict[int, dict[str, Any]]()
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code} {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if chunks is not None:
                if chunks == 0:
                    break
                chunks -= 1
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                content += choice["delta"].get("content") or ""
                for delta in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(delta["index"], {"type": "function", "function": {"arguments": ""}})
                    call["id"] = delta.get("id") or call["id"]
                    call["function"]["name"] = delta["function"].get("name") or call["function"]["name"]
                    call["function"]["arguments"] += delta["function"].get("arguments") or ""
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls.values())} if calls else {})


def compare(path: Path, turns: Sequence[Turn], number: int, seed: int) -> tuple[int, int]:
    """Generate some answers again, each alone. Returns how many differ from what the clients got, and of how many."""
    chosen = random.Random(seed).sample(turns, min(number, len(turns)))
    engine = Engine(load(path), prefix_cache_bytes=0, batch_size=1)
    different = 0
    for turn in chosen:
        tokens = turn.stream.result().tokens
        alone = engine.submit(turn.request).result().tokens
        different += list(alone[: len(tokens)]) != list(tokens)
    engine.close()
    return different, len(chosen)


if __name__ == "__main__":
    main()
