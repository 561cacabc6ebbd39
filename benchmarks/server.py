"""`mlxlm serve` through HTTP, compared with mlx_lm's server on the same model, greedy and streamed.

    python benchmarks/server.py [MODEL] [--quick] [--rounds 2] [--peers mlxlm mlx_lm ...]

Tokens per second and the time to the first token with several clients; a chat with a long system prompt; the second
turn behind a long first one; how long running streams stand still while the prompt of another is read; peak memory.

Each server is started alone, in turn. mlx_lm's runs as installed and, on Linux, with the BLAS that mlxlm uses. If
llama_cpp.server can be imported, it serves the model as a .gguf file, with its own number of threads and one request at
a time, so that it has no running streams. Without MODEL, a Llama with random weights is written. A random model's
answers aren't the tokens that its text is encoded to, so that in a chat they are read again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
from common import median, report, spread
from serving import Answer, Client, Peer, Server, Texts, make_model, serve_command, serving

PROMPT, CHUNK = 32, 512  # tokens of a client's prompt; of a chunk of a prompt that mlxlm reads while streams run
MLX_LM_WITH_BLAS = "from mlxlm.backend.blas import load_blas; load_blas(); from mlx_lm.server import main; main()"


@dataclass(frozen=True)
class Sizes:
    """How much is measured; all but the numbers of clients and turns are tokens."""

    clients: tuple[int, ...] = (1, 4, 8, 32)
    answer: int = 64
    system: int = 2000
    turns: int = 10
    history: int = 4000
    joining: int = 2000
    streams: int = 8


QUICK = Sizes(clients=(1, 8, 32), answer=16, system=300, turns=3, history=600, joining=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="model folder in the Hugging Face layout")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smaller prompts and one round: four minutes on two cores, most for mlx_lm as installed",
    )
    parser.add_argument("--rounds", type=int, help="default 2; with --quick 1")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these columns of the table")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        model = (options.model or make_model(Path(folder, "model"))).resolve()
        peers = [peer for peer in find_peers(Path(folder)) if options.peers is None or peer.name in options.peers]
        results: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
        for n in range(options.rounds or (1 if options.quick else 2)):
            for peer in peers:
                with serving(peer.command, model) as server:
                    results[peer.name].append(asyncio.run(measure(server, Texts(model, n), sizes)))
                print(f"{peer.name}, load {os.getloadavg()[0]:.1f}: {results[peer.name][-1]}", file=sys.stderr)
    columns = {peer: {name: [r[name] for r in rounds] for name in rounds[0]} for peer, rounds in results.items()}
    cells = {peer: {name: spread(values) for name, values in column.items()} for peer, column in columns.items()}
    width = 2 + max(len(cell) for column in cells.values() for cell in column.values())
    rows = [("", "".join(f"{peer:<{width}}" for peer in cells))]
    names = max(cells.values(), key=len)
    rows += [(name, "".join(f"{column.get(name, ''):<{width}}" for column in cells.values())) for name in names]
    medians = {peer: {name: round(median(v), 4) for name, v in column.items()} for peer, column in columns.items()}
    report("servers", rows, {"benchmark": "server", "quick": options.quick, "peers": medians})


def find_peers(folder: Path) -> list[Peer]:
    """The servers that can run here."""
    from mlxlm.backend.blas import load_blas

    def mlx_lm_options(model: Path, port: int) -> list[str]:
        return ["--model", str(model), "--port", str(port), "--log-level", "WARNING"]

    python = sys.executable
    peers = [
        Peer("mlxlm", serve_command),
        Peer("mlx_lm", lambda *where: [python, "-m", "mlx_lm", "server", *mlx_lm_options(*where)]),
    ]
    if load_blas().path:
        command = [python, "-c", MLX_LM_WITH_BLAS]
        peers.append(Peer("mlx_lm, fast BLAS", lambda *where: [*command, *mlx_lm_options(*where)]))
    if find_spec("llama_cpp") and find_spec("llama_cpp.server"):
        peers.append(Peer("llama.cpp", lambda *where: llama_cpp_command(folder, *where)))
    return peers


def llama_cpp_command(folder: Path, model: Path, port: int) -> list[str]:
    from mlxlm.convert import convert

    path = folder / "model.gguf"
    if not path.exists():
        convert(model, path, outtype="F32", verify_output=False)
    # Threads that don't spin while they wait: else anything else that runs makes prompts many times slower.
    command = ["env", "OMP_WAIT_POLICY=passive", sys.executable, "-m", "llama_cpp.server", "--model", str(path)]
    return [*command, "--port", str(port), "--n_ctx", "8192", "--interrupt_requests", "false"]


async def measure(server: Server, texts: Texts, sizes: Sizes) -> dict[str, float]:
    watching = asyncio.create_task(server.watch_memory())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        client = Client(http, texts)
        results = {}
        for n in sizes.clients:
            results |= await measure_clients(client, texts, n, sizes.answer)
        results |= await measure_chat(client, texts, sizes)
        results |= await measure_second_turn(client, texts, sizes.history)
        results |= await measure_joining(client, texts, sizes)
    watching.cancel()
    return {**results, "peak memory, MB": max(server.memory) / 1e6}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def measure_clients(client: Client, texts: Texts, n: int, max_tokens: int) -> dict[str, float]:
    prompts = [[user(texts(PROMPT))] for _ in range(n)]
    start = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(prompt, max_tokens) for prompt in prompts))
    seconds = time.perf_counter() - start
    first = [answer.first for answer in answers]
    case = f"{n} client{'s' if n > 1 else ''}"
    return {
        f"{case}: tokens/s": sum(answer.num_tokens for answer in answers) / seconds,
        f"{case}: first token, median s": median(first),
        f"{case}: first token, maximum s": max(first),
        f"{case}: connections refused": sum(answer.num_refused for answer in answers),
    }


async def measure_chat(client: Client, texts: Texts, sizes: Sizes) -> dict[str, float]:
    messages = [{"role": "system", "content": texts(sizes.system)}]
    results = {}
    for turn in range(1, sizes.turns + 1):
        messages.append(user(texts(PROMPT)))
        answer = await client.ask(messages, 16)
        messages.append({"role": "assistant", "content": answer.text})
        results[f"system prompt of {sizes.system}: first token of turn {turn}, s"] = answer.first
    return results


async def measure_second_turn(client: Client, texts: Texts, history: int) -> dict[str, float]:
    messages = [user(texts(history))]
    first = await client.ask(messages, 16)
    second = await client.ask([*messages, {"role": "assistant", "content": first.text}, user(texts(PROMPT))], 16)
    return {
        f"message of {history}: first token, s": first.first,
        f"message of {history}: first token of turn 2, s": second.first,
    }


async def measure_joining(client: Client, texts: Texts, sizes: Sizes) -> dict[str, float]:
    """How long streams stand still while a prompt is read; nothing for a server that runs one request at a time."""
    chunk = await client.ask([user(texts(CHUNK))], 1)
    streams = [Answer(time.perf_counter()) for _ in range(sizes.streams)]
    tasks = [asyncio.create_task(client.ask([user(texts(PROMPT))], 4000, answer)) for answer in streams]
    while min(len(answer.times) for answer in streams) < 10:
        await asyncio.sleep(0.01)
        if any(len(answer.times) > 500 for answer in streams) and not all(answer.times for answer in streams):
            await cancel(tasks)
            return {}
        if any(task.done() for task in tasks):
            raise SystemExit("the answers are too short for streams that another prompt joins")
    joining = await client.ask([user(texts(sizes.joining))], 1)
    end = joining.times[0]
    while min(answer.times[-1] for answer in streams) <= end and not any(task.done() for task in tasks):
        await asyncio.sleep(0.01)  # the first chunk after the join ends the last gap
    await cancel(tasks)
    during, before = [], []
    for answer in streams:
        for a, b in zip(answer.times, answer.times[1:], strict=False):
            if b > joining.start and a < end:
                during.append(b - a)
            elif b <= joining.start:
                before.append(b - a)
    return {
        f"prompt of {CHUNK} alone: first token, s": chunk.first,
        f"{sizes.streams} streams: median gap, s": median(before),
        f"{sizes.streams} streams, a prompt of {sizes.joining} joins: its first token, s": joining.first,
        f"{sizes.streams} streams, a prompt of {sizes.joining} joins: longest gap, s": max(during),
        f"the same, in chunks of {CHUNK}": max(during) / chunk.first,
    }


async def cancel(tasks: list[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
