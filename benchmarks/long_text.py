"""Memory of generating one long text, with a rotating key-value cache and with a full one.

    python benchmarks/long_text.py [--tokens 20000] [--max-kv-size 1024] [--kv-bits 8]

Each runs in a new process on a small Llama with random weights. The table shows MLX's active memory and the resident
memory of the process after each tenth of the text, the JSON line the growth between the second tenth and the last.
"""

from __future__ import annotations

import argparse
import json
import sys

from common import report, timed_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--max-kv-size", type=int, default=1024)
    parser.add_argument("--kv-bits", default="8", help="bits of the rotating quantized cache")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.tokens, *options.worker)
        return
    kinds = {
        "full": ("0", "none"),
        f"rotating, {options.max_kv_size} tokens": (str(options.max_kv_size), "none"),
        f"rotating, {options.kv_bits} bits": (str(options.max_kv_size), options.kv_bits),
    }
    rows, result = [], {}
    for kind, (size, bits) in kinds.items():
        command = [sys.executable, __file__, "--tokens", str(options.tokens), "--worker", size, bits]
        samples = json.loads(timed_command(command)[2].splitlines()[-1])
        for key, label in (("active", "MLX's arrays"), ("resident", "the process")):
            rows.append((f"{kind}: {label}, MB", " ".join(f"{s[key] / 1e6:.1f}" for s in samples)))
        rows.append((f"{kind}: tokens/s", " ".join(f"{s['speed']:.0f}" for s in samples)))
        grown = {key: round((samples[-1][key] - samples[1][key]) / 1e6, 2) for key in ("active", "resident")}
        result[kind] = {"grown_mb": grown, "speed": [round(samples[i]["speed"]) for i in (1, -1)]}
    title = f"{options.tokens} tokens, after each tenth"
    report(title, rows, {"benchmark": "long_text", "tokens": options.tokens, "kinds": result})


def worker(count: int, size: str, bits: str) -> None:
    import time

    from mlxlm.backend import platform
    from mlxlm.backend.mlx import mx
    from mlxlm.cache import KVOptions
    from mlxlm.families import load_preset
    from mlxlm.generation import greedy_tokens
    from mlxlm.generation.decode_step import DecodeStep
    from mlxlm.model import Decoder

    model = Decoder(load_preset("1m", vocab_size=2048, max_position_embeddings=2 * count))
    model.init_weights(0)
    kv = KVOptions.of(size=int(size) or None, bits=bits)
    samples, start = [], time.perf_counter()
    tenth = count // 10
    for n, _ in enumerate(greedy_tokens(DecodeStep(model), [1, 2, 3], count, kv=kv), 1):
        if n % tenth == 0:
            now = time.perf_counter()
            memory = {"active": mx.get_active_memory(), "resident": platform.process_memory()}
            samples.append({**memory, "speed": tenth / (now - start)})
            start = now
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
