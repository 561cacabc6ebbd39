"""Agents at work: sessions of many turns at once, with tool calls, edits of earlier messages and disconnects.

    python benchmarks/agent_session.py [MODEL] [--turns 100] [--clients 4] [--max-memory GB] [--checked 40]

Prints which share of the reusable prompt tokens came from the prefix cache. Reusable is what a prompt shares with the
longest earlier text of any client that had ended by then: as much of its prompt as was read, and its answer but for the
last token. Also the largest memory of the server's process compared with --max-memory, and whether greedy answers are
those of the same prompts alone, without a prefix cache. Exits with 1 if one of the three is not as promised.

Without MODEL, a Llama with random weights is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import peak_memory, report
from serving import Texts, make_model, serving

from mlxlm.generation import Engine, load
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
Turn = dict[str, Any]  # a text of the server, see recording_server.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="model with a chat template")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-memory", type=float, default=1.0, metavar="GB")
    parser.add_argument("--checked", type=int, default=40, help="answers to generate again alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit = int(options.max_memory * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**SIZES, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
        path, log = options.model or make_model(Path(folder, "model"), **sizes), Path(folder, "turns")

        def command(model: Path, port: int) -> list[str]:
            script = str(Path(__file__).with_name("recording_server.py"))
            settings = {"port": port, "max-memory": limit, "log-level": "warning"}
            return [sys.executable, script, str(log), str(model), *(f"--{k}={v}" for k, v in settings.items())]

        with serving(command, path) as server:
            counts = asyncio.run(work(server.url, Texts(path, options.seed), options))
        memory, turns = peak_memory(resource.RUSAGE_CHILDREN), list(read(log))
        different, checked = compare(path, turns, options.checked, options.seed)
    reusable = [reusable_tokens(turn, turns) for turn in turns]
    reused = [min(turn["cached"], n) for turn, n in zip(turns, reusable, strict=True)]
    for missing, n in sorted(((n - m, n) for m, n in zip(reused, reusable, strict=True)), reverse=True)[:5]:
        print(f"{missing} of {n} reusable tokens were not cached", file=sys.stderr)
    share, total = sum(reused) / sum(reusable), sum(len(turn["request"].prompt) for turn in turns)
    rows = [
        ("requests", f"{len(turns)}: {', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}"),
        ("prompt tokens; reusable; cached", f"{total:,}; {sum(reusable):,}; {sum(reused):,}"),
        ("share of the reusable tokens", f"{share:.2%}"),
        ("memory of the server, at most", f"{human_bytes(memory)} of {human_bytes(limit)}"),
        ("answers that differ from those alone", f"{different} of {checked}"),
    ]
    result = {"benchmark": "agent_session", "share": share, "reusable": sum(reusable), "prompt_tokens": total}
    result |= {"memory": memory, "max_memory": limit, "different": different, "checked": checked}
    report(f"{options.clients} agents, {options.turns} turns each", rows, result)
    raise SystemExit(1 if share < GOAL or memory > limit or different else 0)


def read(log: Path) -> Iterator[Turn]:
    """The texts that the server has written."""
    with log.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def reusable_tokens(turn: Turn, turns: Sequence[Turn]) -> int:
    """How many tokens of a prompt the server had read before, without the last one, which is read for its logits."""

    def shared(other: Turn) -> int:
        n = min(len(prompt), len(other["known"]))
        return int(np.argmin(np.append(prompt[:n] == np.asarray(other["known"])[:n], False)))

    prompt = np.array(turn["request"].prompt[:-1])
    return max((shared(other) for other in turns if other["ended"] < turn["began"]), default=0)


async def work(url: str, texts: Texts, options: argparse.Namespace) -> Counter[str]:
    """Run the clients. Returns what they did."""
    counts = Counter[str]()
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        agents = (
            agent(http, texts, random.Random(options.seed + n), options.turns, counts) for n in range(options.clients)
        )
        await asyncio.gather(*agents)
    return counts


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
    answered = [turn for turn in turns if turn["tokens"]]
    chosen = random.Random(seed).sample(answered, min(number, len(answered)))
    different = 0
    with Engine(load(path), prefix_cache_bytes=0, batch_size=1) as engine:
        for turn in chosen:
            alone = engine.submit(turn["request"]).result().tokens
            different += list(alone[: len(turn["tokens"])]) != list(turn["tokens"])
    return different, len(chosen)


if __name__ == "__main__":
    main()
