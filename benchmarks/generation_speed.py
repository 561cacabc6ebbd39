"""Prompt and decoding speed, time to the first token and peak memory, compared with mlx_lm on the same checkpoints.

    python benchmarks/generation_speed.py [--sizes 26m 110m 500m] [--contexts 0 2048 8192] [--rounds 3] [--model DIR]

Models with random weights are written at 16 and 4 bits. `--peers mlx_lm pytorch` adds transformers on PyTorch, on
CUDA where it can, at 16 bits, if they are installed. `--model FILE.gguf --peers llama_cpp` compares with llama.cpp
(`pip install llama-cpp-python`), with a thread for each core. "share" is how much of the measured memory bandwidth
mlxlm's decoding reaches: a token reads every weight, and the keys and values of the context. On a GPU, memory is that
of MLX's or PyTorch's allocator. Every measurement is a new process, in turn, with mlx_lm as installed and the defaults
of both. The context before decoding is random keys and values in the caches, because mlx_lm would take an hour to read
8,192 tokens; llama.cpp reads it. Prompts are measured separately. Decoding runs for `--seconds` or `--tokens`,
whichever is reached first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from common import median, report, spread, timed_command

PEERS = ("mlxlm", "mlx_lm", "pytorch", "llama_cpp")  # the first is compared with each of the others
KINDS = {"prompt": "tokens/s", "decode": "tokens/s", "first_token": "s", "memory": "MB"}
VOCAB_SIZE = 32_000
SIZES = {  # hidden size, layers, heads, key heads, feed-forward: Llama's proportions
    "1m": (128, 2, 2, 2, 384),
    "26m": (384, 8, 6, 6, 1024),
    "110m": (768, 12, 12, 12, 2048),
    "500m": (1280, 22, 20, 20, 3584),
    "1b": (2048, 22, 32, 4, 5632),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["26m", "110m", "500m"])
    parser.add_argument("--peers", nargs="+", choices=PEERS[1:], default=["mlx_lm"], help="what mlxlm is compared with")
    parser.add_argument("--bits", nargs="+", type=int, choices=(16, 4), default=[16, 4])
    parser.add_argument("--contexts", nargs="+", type=int, default=[0, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument(
        "--short", type=int, default=8, help="tokens of the prompt at 4 bits, which mlx_lm reads slowly on a CPU"
    )
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of tokens to decode")
    parser.add_argument("--seconds", type=float, default=8.0, help="maximum time to decode")
    parser.add_argument("--model", type=Path, help="use this folder or GGUF file instead")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, metavar="DIR", help="only write the first size's models into DIR")
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
    elif options.make:
        make_models(options.make, options.sizes[0], [16, 4])
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    result, rows = {}, []
    for size in ["model"] if options.model else options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if options.model:
                models = {"given": options.model}
            else:
                bits = [str(b) for b in options.bits]
                # In its own process: the peak memory of a child includes that of its parent.
                maker = [sys.executable, __file__, "--sizes", size, "--bits", *bits, "--make", folder]
                timed_command(maker)
                models = {f"{b}-bit": Path(folder, f"{b}-bit") for b in bits}
            for label, path in models.items():
                for context in options.contexts:
                    case = f"{size}, {label}, context {context}"
                    results = measure(
                        path, case, context, options.short if label == "4-bit" else options.prompt, options
                    )
                    result[case] = {}
                    share = median([r["share"] for r in results["mlxlm"]])
                    rows.append((f"{case}: share of memory bandwidth", f"{share:.0%}"))
                    result[case]["share"] = round(share, 3)
                    for peer in list(results)[1:]:
                        for kind, unit in KINDS.items():
                            ours, theirs = ([r[kind] for r in results[one]] for one in ("mlxlm", peer))
                            faster = unit == "tokens/s"
                            ratio = median([a / b if faster else b / a for a, b in zip(ours, theirs, strict=True)])
                            shown = f"{spread(ours)}; {peer} {spread(theirs)}; {ratio:.2f} x"
                            rows.append((f"{case}: {kind}, {unit}", shown))
                            measured = [round(median(ours), 3), round(median(theirs), 3), round(ratio, 2)]
                            result[case][kind if peer == "mlx_lm" else f"{kind} ({peer})"] = measured
    title = "generation: mlxlm; the other; how many times better"
    report(title, rows, {"benchmark": "generation_speed", "cases": result})


def measure(path: Path, case: str, context: int, prompt: int, options: argparse.Namespace) -> dict[str, list[dict]]:
    has_pytorch = "4-bit" not in case and find_spec("torch") and find_spec("transformers")
    peers = ["mlxlm", *(peer for peer in options.peers if peer != "pytorch" or has_pytorch)]
    results: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    for _ in range(options.rounds):
        for peer in peers:
            arguments = [peer, path, context, prompt, options.tokens, options.seconds]
            _, peak, out = timed_command([sys.executable, __file__, "--worker", *map(str, arguments)])
            results[peer].append({"memory": peak / 1e6, **json.loads(out.splitlines()[-1])})
            print(f"{case}, {peer}: {results[peer][-1]}", file=sys.stderr)
    return results


def make_models(folder: Path, size: str, bits: list[int]) -> None:
    from mlx.utils import tree_flatten

    from mlxlm.checkpoint import save_weights
    from mlxlm.config import ModelConfig
    from mlxlm.convert import convert
    from mlxlm.families import config_to_hf
    from mlxlm.model import Decoder
    from mlxlm.quantize import quantize
    from mlxlm.tokenizer import train
    from mlxlm.utils.json_files import write_json

    hidden, layers, heads, kv_heads, feed_forward = SIZES[size]
    config = ModelConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=feed_forward, vocab_size=VOCAB_SIZE, max_position_embeddings=16_384, tie_word_embeddings=True,
    )  # fmt: skip
    source = folder / "source"
    source.mkdir()
    model = Decoder(config)
    model.init_weights(0)
    save_weights(source, dict(tree_flatten(model.parameters())))
    write_json(source / "config.json", config_to_hf(config))
    train(["a tokenizer that the benchmark never uses: prompts are token ids"], 270).save(source)
    if 16 in bits:
        convert(source, folder / "16-bit", dtype="float16", verify_output=False)
    if 4 in bits:
        quantize(source, folder / "4-bit", bits=4, method="rtn", evaluate=False)


def worker(peer: str, path: str, context: str, *limits: str) -> None:
    """Measure in this process and print one JSON line. The first token's time includes imports and loading."""
    prompt, tokens, seconds = limits
    start = time.perf_counter()
    context_length, ids = int(context), token_ids(int(prompt))
    openers = {"mlxlm": open_mlxlm, "mlx_lm": open_mlx_lm, "pytorch": open_pytorch, "llama_cpp": open_llama_cpp}
    generate = openers[peer](Path(path))
    next(generate(ids, 0, 2))
    first = time.perf_counter() - start
    start = time.perf_counter()
    next(generate(ids, 0, 2))  # once more: this one neither compiles nor reads weights
    read = time.perf_counter() - start
    times = []
    for _ in generate(ids[:2], context_length, int(tokens)):
        times.append(time.perf_counter())
        if len(times) > 2 and times[-1] - times[0] > float(seconds):
            break
    decode = (len(times) - 1) / (times[-1] - times[0])
    measured = {"prompt": len(ids) / read, "decode": decode, "first_token": first}
    if (memory := gpu_memory(peer)) is not None:
        measured["memory"] = memory / 1e6
    if peer == "mlxlm":
        measured["share"] = share_of_bandwidth(Path(path), context_length + len(times) // 2, decode)
    print(json.dumps(measured))


def token_ids(count: int) -> list[int]:
    return [(7 * i) % 1000 for i in range(count)]


def gpu_memory(peer: str) -> int | None:
    """Peak bytes of the allocator on a GPU; None on a CPU."""
    if peer == "llama_cpp":
        return None
    if peer == "pytorch":
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    import mlx.core as mx

    return mx.get_peak_memory() if mx.default_device() != mx.Device(mx.cpu) else None


def share_of_bandwidth(path: Path, tokens: int, speed: float) -> float:
    """How much of the measured memory bandwidth a decoding speed uses, with `tokens` in the cache."""
    import mlxlm
    from mlxlm.backend.bandwidth import cached_bandwidth, measure_bandwidth, weight_bytes
    from mlxlm.generation import get_engine

    lm = mlxlm.load(path)
    read = weight_bytes(lm.model) + get_engine(lm).kv_bytes_for(tokens)
    return read * speed / (cached_bandwidth() or measure_bandwidth())


def open_mlxlm(path: Path) -> Callable[[list[int], int, int], Iterator]:
    import mlxlm
    from mlxlm.generation import Context, GenerationOptions, Sampler
    from mlxlm.generation.context import UNLIMITED
    from mlxlm.generation.decode_step import DecodeStep
    from mlxlm.generation.decoding import Batch, Row

    model = mlxlm.load(path).model
    step, heads = DecodeStep(model), (model.config.num_key_value_heads, model.config.head_dim)

    def generate(ids: list[int], context_length: int, n: int) -> Iterator:
        context = Context(model)
        if context_length:
            with context.transaction() as read:
                fill(context.caches, model, *heads, context_length)
                read.extend(range(context_length))  # any tokens that the prompt begins with
        context.read(ids[:-1])
        row, batch = Row([*range(context_length), *ids], n), Batch(step, UNLIMITED, None)
        row.sampler = Sampler(GenerationOptions(temperature=0), row.prompt, 0)
        batch.join([row], context.caches)
        while not row.finished:
            if batch.step():
                yield row.last_token

    return generate


def open_mlx_lm(path: Path) -> Callable[[list[int], int, int], Iterator]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, config = load_model(path)

    def generate(ids: list[int], context_length: int, n: int) -> Iterator:
        caches = make_prompt_cache(model)
        if context_length:
            fill(caches, model, config["num_key_value_heads"], config["head_dim"], context_length)
        return generate_step(mx.array(ids), model, max_tokens=n, prompt_cache=caches)

    return generate


def open_pytorch(path: Path) -> Callable[[list[int], int, int], Iterator]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    config = json.loads((path / "config.json").read_text())

    @torch.inference_mode()
    def generate(ids: list[int], context_length: int, n: int) -> Iterator:
        cache = DynamicCache()
        shape = (1, config["num_key_value_heads"], context_length, config["head_dim"])
        for layer in range(config["num_hidden_layers"] if context_length else 0):
            cache.update(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), layer)
        tokens = torch.tensor([ids], device=device)
        for _ in range(n):
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            tokens = logits.argmax(-1, keepdim=True)
            yield tokens.item()

    return generate


def open_llama_cpp(path: Path) -> Callable[[list[int], int, int], Iterator]:
    import numpy as np
    from llama_cpp import Llama, llama_get_logits

    model = Llama(str(path), n_ctx=0, n_batch=512, n_threads=os.cpu_count(), verbose=False)

    def generate(ids: list[int], context_length: int, n: int) -> Iterator:
        model.reset()
        model.eval([*token_ids(context_length), *ids])
        for _ in range(n):
            logits = np.ctypeslib.as_array(llama_get_logits(model.ctx), (model.n_vocab(),))
            token = int(logits.argmax())
            yield token
            model.eval([token])

    return generate


def fill(caches: list, model, kv_heads: int, head_dim: int, context_length: int) -> None:
    """Fill the caches with random keys and values, in the dtype of the model."""
    import mlx.core as mx

    shape = (1, kv_heads, context_length, head_dim)
    dtype = model(mx.array([[1]])).dtype
    for layer, cache in enumerate(caches):
        random = (mx.random.normal(shape, key=mx.random.key(2 * layer + i)) for i in range(2))
        mx.eval(cache.update_and_fetch(*(x.astype(dtype) for x in random)))


if __name__ == "__main__":
    main()
