"""Throughput of many short prompts, as a batch and one by one, and whether the texts are equal.

python benchmarks/batching.py [--prompts 32] [--tokens 64] [--rounds 3] [--sizes 26m 110m]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import in_turn, median, report, spread
from generation_speed import SIZES, make_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26m", "110m"])
    options = parser.parse_args()
    rows, result = [], {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_models(Path(folder), size, [16])
            results, equal = measure(Path(folder, "16-bit"), options)
        ratios = [alone / together for alone, together in zip(results["one by one"], results["batch"], strict=True)]
        produced = options.prompts * options.tokens
        for name, times in results.items():
            rows.append((f"{size}: {name}", f"{spread([produced / t for t in times])} tokens/s"))
        rows.append((f"{size}: speed-up", f"{spread(ratios)} x; equal texts: {equal} of {options.prompts}"))
        result[size] = {"speed_up": round(median(ratios), 2), "equal": equal}
    title = f"{options.prompts} prompts of 4 to 35 tokens, {options.tokens} new tokens each"
    report(title, rows, {"benchmark": "batching", "prompts": options.prompts, "sizes": result})


def measure(path: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    import mlxlm
    from mlxlm.generation.gumbel_noise import derive_seed

    lm = mlxlm.load(path)
    prompts = [[(7 * i * j + j) % 1000 for j in range(1, 5 + i % 32)] for i in range(options.prompts)]
    settings = {"max_tokens": options.tokens, "temperature": 0.8}
    seeds = [derive_seed(1, str(i), 0) for i in range(1, options.prompts + 1)]  # those of a batch with seed 1
    texts: dict[str, list[list[int]]] = {}

    def timed(name: str, generate) -> float:
        start = time.perf_counter()
        texts[name] = [result.tokens for result in generate()]
        return time.perf_counter() - start

    def alone():
        return (mlxlm.generate(lm, p, seed=s, **settings) for p, s in zip(prompts, seeds, strict=True))

    mlxlm.generate(lm, prompts[0], **settings)  # warm-up
    results = in_turn(
        options.rounds,
        **{
            "one by one": lambda: timed("alone", alone),
            "batch": lambda: timed("batch", lambda: mlxlm.batch(lm, prompts, seed=1, **settings)),
        },
    )
    return results, sum(a == b for a, b in zip(texts["alone"], texts["batch"], strict=True))


if __name__ == "__main__":
    main()
