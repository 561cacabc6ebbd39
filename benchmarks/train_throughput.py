"""Training throughput of mlxlm, of the same model in plain MLX, and of PyTorch, alternating on this machine.

    python benchmarks/train_throughput.py [--models 1M,5M,25M,100M] [--rounds 5] [--profile]
    python benchmarks/train_throughput.py --models 110m,1b --ways mlxlm,pytorch_mixed   # presets, on a GPU

All train with AdamW on the same random tokens. mlxlm computes in float32 on a CPU, and on a GPU in bfloat16 with
float32 weights, as "pytorch_mixed" does (torch.autocast); PyTorch runs on CUDA where it can. Utilization is the
FLOP/s of the model relative to those of large matrix products that were measured on the same device, or to
`--peak-tflops`. "plain_mlx" is the same decoder with MLX's own attention, activation and cross-entropy, whole batches,
compiled, with MLX's default allocator cache; "mlxlm_whole" is mlxlm without cutting the batch in parts. PyTorch is
transformers' LlamaForCausalLM, eager, with torch.optim.AdamW, in float32 and with weights, activations and optimizer
in bfloat16; it is skipped if it is not installed. Each has its own process, and ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from common import in_turn, median, plain_mlx, report, spread

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.config import ModelConfig
from mlxlm.data import Batch
from mlxlm.families import config_to_hf, load_preset
from mlxlm.model import Decoder
from mlxlm.plan.machines import measure_matmul
from mlxlm.train import TrainSettings
from mlxlm.train import step as step_module
from mlxlm.train.start import DEVICE_DTYPE

MODELS = {  # hidden, layers, heads, key-value heads, inner, vocabulary
    "1M": (128, 4, 4, 2, 344, 2048),
    "5M": (256, 6, 8, 4, 688, 4096),
    "25M": (512, 8, 8, 4, 1376, 8192),
    "100M": (768, 12, 12, 12, 2048, 16384),
}


WAYS = ("mlxlm", "mlxlm_whole", "plain_mlx", "pytorch_float32", "pytorch_bfloat16", "pytorch_mixed")
DEFAULT_WAYS = WAYS[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, or presets")
    parser.add_argument(
        "--ways", default=",".join(DEFAULT_WAYS), help=f"some of {', '.join(WAYS)}; ratios are those of the first"
    )
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the utilization")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-seq-length", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="also time the parts of a step by themselves")
    parser.add_argument("--serve", nargs=2, metavar=("WAY", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options)
        return
    B, T = options.batch_size, options.max_seq_length
    rows, results = [("products by", load_blas().name if ON_CPU else "GPU")], {}
    size = 1024 if ON_CPU else 8192
    options.products = measure_matmul(size, dtype=DEVICE_DTYPE)
    options.peak = 1e3 * options.peak_tflops if options.peak_tflops else options.products
    for name in options.models.split(","):
        results[name] = measured(name, options, rows)
    rows.append((f"a product of {size} x {size} {DEVICE_DTYPE} matrices", f"{options.products:.0f} GFLOP/s"))
    speeds = {"product_gflops": round(options.products, 1), "peak_gflops": round(options.peak, 1)}
    result = {"benchmark": "train_throughput", "blas": load_blas().name, **speeds, "models": results}
    report(f"training, {B} x {T} tokens a step, tokens/s", rows, result)
    if options.profile:
        for name in options.models.split(","):
            profile(model_config(name), B, T)


def model_config(name: str) -> ModelConfig:
    if name not in MODELS:
        return load_preset(name)
    hidden, layers, heads, kv_heads, inner, vocabulary = MODELS[name]
    return ModelConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip


def measured(name: str, options: argparse.Namespace, rows: list[tuple[str, str]]) -> dict:
    """Measure one model in all ways, each in its own process; appends to the `rows` of the table."""
    config = model_config(name)
    sizes = [f"--{key}={getattr(options, key.replace('-', '_'))}" for key in ("steps", "batch-size", "max-seq-length")]
    servers = {}
    for way in options.ways.split(","):
        command = [sys.executable, __file__, "--serve", way, name, *sizes]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if server.stdout.readline():  # compiled and warm, or missing
            servers[way] = server

    def run(server: subprocess.Popen) -> float:
        time.sleep(0.3)  # the threads of the one before look for work for 0.2 s
        server.stdin.write("\n")
        server.stdin.flush()
        return float(server.stdout.readline())

    measurements = in_turn(options.rounds, **{way: partial(run, server) for way, server in servers.items()})
    for server in servers.values():
        server.stdin.close()
        server.wait()
    first, ratios, utilization = next(iter(measurements)), {}, {}
    flops = config.flops_per_token(options.max_seq_length // 2, training=True)
    for way, values in measurements.items():
        gflops = flops * median(values) / 1e9
        utilization[way] = round(gflops / options.peak, 4)
        text = f"{spread(values)}, {gflops:.0f} GFLOP/s, {utilization[way]:.0%} utilization"
        if way != first:
            ratio = median([a / b for a, b in zip(measurements[first], values, strict=True)])
            ratios[f"{first}/{way}"] = round(ratio, 3)
            text += f", {first} is {ratio:.2f}"
        rows.append((f"{name} {way}", text))
    speeds = {way: round(median(values), 1) for way, values in measurements.items()}
    result = {"parameters": config.parameter_count(), "tokens_per_second": speeds}
    return {**result, "utilization": utilization, "ratios": ratios}


def serve(way: str, name: str, options: argparse.Namespace) -> None:
    """Train and print tokens/s for each line of input, after a first line when ready; return if a way is missing."""
    config, B, T = model_config(name), options.batch_size, options.max_seq_length
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (B, T + 1)).astype(np.int32)
    makers = {
        "mlxlm": ours,
        "mlxlm_whole": whole,
        "plain_mlx": plain,
        "pytorch_float32": partial(pytorch, dtype="float32"),
        "pytorch_bfloat16": partial(pytorch, dtype="bfloat16"),
        "pytorch_mixed": partial(pytorch, dtype="float32", mixed=True),
    }
    if (run := makers[way](config, tokens, options.steps)) is None:
        return
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(run(), flush=True)


def ours(config: ModelConfig, tokens: np.ndarray, steps: int) -> Callable[[], float]:
    """A function that trains `steps` steps and returns tokens/s."""
    model = Decoder(config)
    model.init_weights(0)
    settings = TrainSettings(steps=10_000, learning_rate=1e-3, batch_size=len(tokens), dtype=DEVICE_DTYPE)
    step = step_module.TrainStep(model, settings)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            mx.eval(step([Batch(tokens)], 1e-3), step.state)
        return steps * (tokens.size - len(tokens)) / (time.perf_counter() - start)

    run()
    return run


def whole(config: ModelConfig, tokens: np.ndarray, steps: int) -> Callable[[], float] | None:
    """The same with the whole batch in one part; None if it is not split anyway."""
    num_batch_shards = step_module.num_batch_shards
    if num_batch_shards(len(tokens)) == 1:
        return None
    step_module.num_batch_shards = lambda batch_size: 1
    try:
        return ours(config, tokens, steps)
    finally:
        step_module.num_batch_shards = num_batch_shards


def plain(config: ModelConfig, tokens: np.ndarray, steps: int) -> Callable[[], float]:
    """The same step on MLX's own operations; they are swapped in while its graph is traced."""
    with plain_mlx():
        run = whole(config, tokens, steps) or ours(config, tokens, steps)

    def with_default_cache() -> float:
        before = mx.set_cache_limit(32 << 20) if ON_CPU else None
        try:
            return run()
        finally:
            if before is not None:
                mx.set_cache_limit(before)

    return with_default_cache


def pytorch(
    config: ModelConfig, tokens: np.ndarray, steps: int, *, dtype: str, mixed: bool = False
) -> Callable[[], float] | None:
    """The same model of transformers with torch.optim.AdamW; None if they are not installed."""
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    values = {k: v for k, v in config_to_hf(config).items() if k not in ("torch_dtype", "architectures")}
    torch.set_num_threads(platform.cpu_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(LlamaConfig(**values, attn_implementation="sdpa")).to(device, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    inputs = torch.tensor(tokens[:, :-1], device=device).long()
    targets = torch.tensor(tokens[:, 1:], device=device).long()
    autocast = partial(torch.autocast, device, dtype=torch.bfloat16, enabled=mixed)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            with autocast():
                logits = model(inputs).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return steps * inputs.numel() / (time.perf_counter() - start)

    run()
    return run


def profile(config: ModelConfig, B: int, T: int) -> None:
    """Forward and backward of each part alone, times its count in a step."""
    from mlxlm.kernels import attention, cross_entropy, swiglu

    h, d, inner, V = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    heads, kv, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    random = mx.random.normal
    x, gate = random((B, T, h)), random((B, T, inner))
    targets = mx.random.randint(0, V, (B, T))
    linear = {"q, o": (heads * d, 2), "k, v": (kv * d, 2), "gate, up, down": (inner, 3)}
    cases = [
        (f"matrices {name}", count * layers, lambda y, w: (y @ w.T) * 1.0, (x, random((width, h))))
        for name, (width, count) in linear.items()
    ]
    q, k = random((B, heads, T, d)), random((B, kv, T, d))
    cases += [
        ("output head", 1, lambda y, w: (y @ w.T) * 1.0, (x, random((V, h)))),
        ("attention", layers, lambda q, k, v: attention(q, k, v, d**-0.5), (q, k, random(k.shape))),
        ("swiglu", layers, swiglu, (gate, random(gate.shape))),
        ("cross-entropy", 1, lambda y: cross_entropy(y, targets), (random((B, T, V)),)),
        ("RMSNorm", 2 * layers + 1, lambda y, w: mx.fast.rms_norm(y, w, 1e-5), (x, random((h,)))),
        ("rotary positions", layers, nn.RoPE(d), (q,)),
    ]
    rows, total = [], 0.0
    for name, count, function, arguments in cases:
        each = milliseconds(function, arguments)
        total += count * each
        rows.append((name, f"{count:3} x {each:7.2f} ms = {count * each:7.1f} ms"))
    report("parts of a step, forward and backward", rows, {"benchmark": "train_parts", "milliseconds": round(total, 1)})


def milliseconds(function, arguments) -> float:
    mx.eval(arguments)
    indices = tuple(range(len(arguments)))
    gradient = mx.compile(mx.value_and_grad(lambda *a: function(*a).sum(), argnums=indices))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        mx.eval(gradient(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    main()
