"""Training tokens/s of mlxlm, of the same model in plain MLX, and of PyTorch, in turn on this machine.

    python benchmarks/train_throughput.py [--rounds 5] [--preset NAME] [--profile]

All train in float32 with AdamW on the same random tokens. "plain MLX" is the same decoder with MLX's own
attention, activation and cross-entropy, compiled, with MLX's default allocator cache. PyTorch is
transformers' LlamaForCausalLM, eager, with torch.optim.AdamW; it is left out where not installed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from common import in_turn, median, report, spread

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx, nn
from mlxlm.cli.doctor import measure_matmul
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder, parts
from mlxlm.train import TrainSettings
from mlxlm.train import step as step_module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--preset", help="a preset instead of the 5.4M model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="also time the parts of a step by themselves")
    options = parser.parse_args()
    config = (
        ModelConfig.preset(options.preset)
        if options.preset
        else ModelConfig(
            hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
            intermediate_size=688, vocab_size=4096, tie_word_embeddings=True,
        )
    )  # fmt: skip
    B, T = options.batch_size, options.sequence_length
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, B, T + 1))
    things = {"mlxlm": ours(config, tokens, options.steps), "plain_mlx": plain(config, tokens, options.steps)}
    if (torch_step := pytorch(config, tokens, options.steps)) is not None:
        things["pytorch"] = torch_step
    found = in_turn(options.rounds, **things)
    rows = [(name, f"{spread(values)} tokens/s") for name, values in found.items()]
    ratios = {}
    for other in list(found)[1:]:
        ratios[f"mlxlm/{other}"] = round(median([a / b for a, b in zip(found["mlxlm"], found[other], strict=True)]), 3)
        rows.append((f"mlxlm / {other}", f"{ratios[f'mlxlm/{other}']:.2f}"))
    flops = config.flops_per_token(T // 2, training=True) * median(found["mlxlm"])
    rows.append(("mlxlm", f"{flops / 1e9:.0f} GFLOP/s of {measure_matmul():.0f} in a matrix product"))
    report(
        f"training, {config.parameter_count() / 1e6:.1f}M parameters, {B} x {T} tokens a step",
        rows,
        {
            "benchmark": "train_throughput",
            "parameters": config.parameter_count(),
            "tokens_per_second": {name: round(median(values), 1) for name, values in found.items()},
            "ratios": ratios,
        },
    )
    if options.profile:
        profile(config, B, T)


def ours(config: ModelConfig, tokens: np.ndarray, steps: int):
    """A function that trains `steps` steps and returns tokens/s."""
    model = Decoder(config)
    model.initialize(0)
    settings = TrainSettings(steps=10_000, learning_rate=1e-3, batch_size=tokens.shape[1])
    step = step_module.TrainStep(model, settings)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            mx.eval(step(tokens, 1e-3), step.state)
        return steps * (tokens.size - tokens.shape[1]) / (time.perf_counter() - start)

    run()
    return run


def plain(config: ModelConfig, tokens: np.ndarray, steps: int):
    """The same step on MLX's own operations; they are swapped in while its graph is traced."""

    def attention(queries, keys, values, scale, training):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")

    def swiglu(gate, up):
        return nn.silu(gate) * up

    own = parts.attention, parts.swiglu, step_module.cross_entropy
    parts.attention, parts.swiglu, step_module.cross_entropy = attention, swiglu, nn.losses.cross_entropy
    try:
        run = ours(config, tokens, steps)
    finally:
        parts.attention, parts.swiglu, step_module.cross_entropy = own

    def with_default_cache() -> float:
        before = mx.set_cache_limit(32 << 20) if ON_CPU else None
        try:
            return run()
        finally:
            if before is not None:
                mx.set_cache_limit(before)

    return with_default_cache


def pytorch(config: ModelConfig, tokens: np.ndarray, steps: int):
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    values = {k: v for k, v in config.to_dict().items() if k not in ("torch_dtype", "architectures")}
    torch.set_num_threads(platform.cpu_cores())
    model = LlamaForCausalLM(LlamaConfig(**values, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    inputs = torch.tensor(tokens[0, :, :-1])
    targets = torch.tensor(tokens[0, :, 1:])

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
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
