"""Time to the first token of chat turns.

The turns are: the first with a long history, the second, and the first after loading the session with and without its
cache.

    python benchmarks/chat_turns.py [--history 4000] [--size 26m] [--rounds 3]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import median, report, spread
from generation_speed import SIZES, make_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, default=4000, help="tokens of the first message")
    parser.add_argument("--size", choices=SIZES, default="26m")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), options.size, [16])
        for i in range(options.rounds):
            session = Path(folder, f"session-{i}.jsonl")
            for name, values in turns(Path(folder, "16-bit"), session, options.history).items():
                results.setdefault(name, []).append(values)
    rows = [
        (name, f"{spread([seconds for seconds, _ in values])} s to the first token, {values[0][1]} tokens read")
        for name, values in results.items()
    ]
    result = {name: {"seconds": round(median([s for s, _ in v]), 4), "read": v[0][1]} for name, v in results.items()}
    report(f"chat, {options.size}, history {options.history}", rows, {"benchmark": "chat_turns", "turns": result})


def turns(path: Path, session: Path, history: int) -> dict[str, tuple[float, int]]:
    import mlxlm

    lm = mlxlm.load(path)
    settings = {"temperature": 0, "max_tokens": 16}
    long, short = "a " * (history // 2), "And?"
    chat = mlxlm.Chat(lm, **settings)
    results = {}

    def say(chat: mlxlm.Chat, text: str, name: str | None = None) -> None:
        for _ in chat.ask(text):
            pass
        last = chat.stats.last
        if name:
            results[name] = last.timings.time_to_first_token, last.prompt_tokens - last.cached_tokens

    say(mlxlm.Chat(lm, **settings), short)  # warm-up
    say(mlxlm.Chat(lm, **settings), short, "the new message in a chat of its own")
    say(chat, long, "first turn, the history")
    chat.save(session, cache=True)
    say(chat, short, "second turn")
    say(mlxlm.Chat.open(session, lm), short, "loaded with its cache")
    session.with_name(f"{session.name}.cache.safetensors").unlink()
    say(mlxlm.Chat.open(session, lm), short, "loaded without it")
    return results


if __name__ == "__main__":
    main()
