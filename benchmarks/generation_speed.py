"""Prompt and decoding tokens/s of mlxlm beside mlx_lm on the same checkpoints, in turn.

    python benchmarks/generation_speed.py [--rounds 3] [--prompt 128] [--tokens 64] [--model DIR]

Without --model, a 26M Llama with random weights is written at 16 and 4 bits. Every measurement is a fresh
process: `mlx_lm` runs as it is installed, `mlx_lm + BLAS` with the BLAS that mlxlm would load.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from common import median, report, spread, timed_command

PEERS = ("mlxlm", "mlx_lm", "mlx_lm + BLAS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--short", type=int, default=8, help="prompt and tokens at 4 bits, slow in mlx_lm on a CPU")
    parser.add_argument("--model", type=Path, help="a model folder instead of the 26M model")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, metavar="DIR", help="only write the 26M models into DIR")
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    if options.make:
        make_models(options.make)
        return
    with tempfile.TemporaryDirectory() as folder:
        models = {"model": options.model} if options.model else make_models(Path(folder))
        result, rows = {}, []
        for label, path in models.items():
            found = measure(path, label, options)
            for kind in ("prompt", "decode"):
                ours = [r[kind] for r in found["mlxlm"]]
                rows.append((f"{label} {kind}: mlxlm", f"{spread(ours)} tokens/s"))
                for peer in PEERS[1:]:
                    theirs = [r[kind] for r in found[peer]]
                    ratio = median([a / b for a, b in zip(ours, theirs, strict=True)])
                    rows.append((f"{label} {kind}: {peer}", f"{spread(theirs)} tokens/s; mlxlm is {ratio:.2f} x"))
                    result[f"{label} {kind} mlxlm/{peer}"] = round(ratio, 2)
        report(
            f"generation, prompt {options.prompt}", rows, {"benchmark": "generation_speed", "ratios": result}
        )


def measure(path: Path, label: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    for _ in range(options.rounds):
        for peer in PEERS:
            lengths = [options.short, options.short] if label == "4-bit" else [options.prompt, options.tokens]
            arguments = [peer, str(path), *map(str, lengths)]
            _, _, out = timed_command([sys.executable, __file__, "--worker", *arguments])
            found[peer].append(json.loads(out.splitlines()[-1]))
            print(f"{label} {peer}: {found[peer][-1]}", file=sys.stderr)
    return found


def make_models(folder: Path) -> dict[str, Path]:
    from mlx.utils import tree_flatten

    from mlxlm.checkpoint import save_weights
    from mlxlm.config import ModelConfig
    from mlxlm.convert import convert
    from mlxlm.files import write_json
    from mlxlm.model import Decoder
    from mlxlm.quantize import quantize
    from mlxlm.tokenizer import train

    config = ModelConfig(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6,
        intermediate_size=1024, vocab_size=32000, tie_word_embeddings=True,
    )  # fmt: skip
    source = folder / "source"
    source.mkdir()
    model = Decoder(config)
    model.initialize(0)
    save_weights(source, dict(tree_flatten(model.parameters())))
    write_json(source / "config.json", config.to_dict())
    train(["a tokenizer that the benchmark never uses: prompts are token ids"], 270).save(source)
    models = {name: folder / name for name in ("16-bit", "4-bit")}
    convert(source, models["16-bit"], dtype="float16", verify_output=False)
    quantize(source, models["4-bit"], bits=4, measure=False)
    return models


def worker(peer: str, path: str, prompt: str, tokens: str) -> None:
    """Measure in this process and print one JSON line: tokens/s of the prompt and of decoding."""
    if peer == "mlx_lm + BLAS":
        from mlxlm import platform

        platform.load_blas()
    ids, n = [(7 * i) % 1000 for i in range(int(prompt))], int(tokens)
    stream = mlxlm_stream(path) if peer == "mlxlm" else mlx_lm_stream(path)
    for _ in stream(ids, 2):  # warm-up: compiles and reads the weights
        pass
    start, times = time.perf_counter(), []
    for _ in stream(ids, n):
        times.append(time.perf_counter())
    print(json.dumps({"prompt": len(ids) / (times[0] - start), "decode": (len(times) - 1) / (times[-1] - times[0])}))


def mlxlm_stream(path: str):
    import mlxlm

    loaded = mlxlm.load(path)
    return lambda ids, n: mlxlm.stream(loaded, ids, temperature=0, max_tokens=n)


def mlx_lm_stream(path: str):
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(path))
    return lambda ids, n: (token for token, _ in generate_step(mx.array(ids), model, max_tokens=n))


if __name__ == "__main__":
    main()
