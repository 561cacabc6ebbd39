"""Models by the kinds of their caches, beside mlx_lm: 1 to 16 texts at once, and the second turn of a conversation.

The weights are random. Both programs run in turn in one process, with the same BLAS, and share all weights that have
the same name in both.

python benchmarks/architectures.py [--kinds "recurrent, dense"] [--clients 1 4 16] [--tokens 48] [--turn 4000]
                                   [--rounds 3] [--width 1] [--experts 16 2]

`--width 4` multiplies the sizes of all matrices: with it, "full attention, dense" has 0.9B parameters, and with
`--experts 32 4`, "full attention, mixture" has 2.6B, of which a token uses 0.5B.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import in_turn, median, report, spread

VOCABULARY = 8192
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LINEAR = {
    "full_attention_interval": 4, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention, dense": ("helium", {"attention_bias": False, "mlp_bias": False}),
    "full attention, mixture": ("qwen3_moe", EXPERTS),
    "windows, dense": (
        "gemma3_text",
        {"sliding_window": 128, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64,
         "rope_local_base_freq": 1e4, "rope_theta": 1e6},
    ),
    "latent attention, mixture": (
        "deepseek_v3",
        {**EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 256,
         "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
    "recurrent, dense": ("qwen3_5", {"text_config": {"model_type": "qwen3_5_text", **SIZES, **LINEAR}}),
    "recurrent, mixture": ("qwen3_next", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 384}),
}  # fmt: skip


# Sizes that `--width` multiplies.
WIDTHS = {
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "linear_num_value_heads", "linear_num_key_heads", "kv_lora_rank", "q_lora_rank",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turn", type=int, default=4000, help="tokens of the conversation before the second turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1, help="factor of the sizes of all matrices")
    parser.add_argument("--experts", nargs=2, type=int, default=(16, 2), help="of a layer, and of a token in it")
    options = parser.parse_args()
    rows, result = [], {}
    for kind in options.kinds:
        measured, parameters, peaks = measure(*KINDS[kind], options)
        single = measured.pop("mlx_lm")
        again, turn = measured.pop("again"), measured.pop("turn")
        rows.append(
            (
                f"{kind}, {parameters / 1e6:,.0f}M parameters: mlx_lm, one text",
                f"{spread(single)} tokens/s, {peaks['mlx_lm'] / 1e6:,.0f} MB besides the weights",
            )
        )
        ratios = {}
        for count, speeds in measured.items():
            ratios[count] = median([speed / base for speed, base in zip(speeds, single, strict=True)])
            memory = f"{peaks[count] / 1e6:,.0f} MB"
            rows.append((f"{kind}: {count} at once", f"{spread(speeds)} tokens/s, {ratios[count]:.2f} x, {memory}"))
        shares = [second / whole for second, whole in zip(turn, again, strict=True)]
        rows.append((f"{kind}: second turn", f"{spread(shares)} of the time of reading {options.turn} tokens again"))
        result[kind] = {
            "parameters": parameters, "ratio": {n: round(r, 2) for n, r in ratios.items()},
            "second_turn": round(median(shares), 3), "mb": {name: round(peak / 1e6) for name, peak in peaks.items()},
        }  # fmt: skip
    report("Models by their caches", rows, {"benchmark": "architectures", "kinds": result})


def measure(
    model_type: str, values: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], int, dict[str, int]]:
    """Measure one kind.

    Returns:
        Tokens per second by the number of texts and of mlx_lm, and seconds to the first token of a second turn and
        anew; the number of parameters; and by how many bytes MLX's memory grew at the peak of each.
    """
    import mlxlm
    from mlxlm.backend.mlx import mx, tree_flatten
    from mlxlm.checkpoint.mlx_lm.model import build_model
    from mlxlm.generation import Engine, GenerationOptions, Request, run_batch

    mx.random.seed(1)
    fields = {"model_type": model_type, **SIZES, **values}
    fields |= {name: options.width * fields[name] for name in WIDTHS & fields.keys()}
    if inner := fields.get("text_config"):
        fields["text_config"] = inner | {name: options.width * inner[name] for name in WIDTHS & inner.keys()}
    if "num_experts" in fields:
        count, fields["num_experts_per_tok"] = options.experts
        fields |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count)
    model, _ = build_model(fields)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:  # as mlx_lm writes it, so that mlxlm runs it as it would any other
        file = f"{folder}/model.safetensors"
        mx.save_safetensors(file, dict(tree_flatten(model.parameters())), {"format": "mlx"})
        model.load_weights(file)  # read when used: only the arrays below that mlxlm has in another form
        Path(folder, "config.json").write_text(json.dumps(fields))
        mlxlm.load("small-world").tokenizer.save(Path(folder))
        lm = mlxlm.load(folder)
        own, weights = dict(tree_flatten(lm.model.parameters())), dict(tree_flatten(model.parameters()))
        same = [name for name, weight in weights.items() if name in own and own[name].shape == weight.shape]
        model.load_weights([(name, own[name] if name in same else weight) for name, weight in weights.items()])
        mx.eval(model.parameters())
    prompts = [[(7 * i * j + j) % 1000 for j in range(1, 65)] for i in range(max(options.clients))]

    def request(prompt: list[int], tokens: int, snapshot_at: int | None = None) -> Request:
        settings = GenerationOptions(temperature=0, max_tokens=tokens)
        return Request(prompt, settings, frozenset(), snapshot_at)

    def together(count: int) -> float:
        engine = Engine(lm, prefix_cache_bytes=0)
        start = time.perf_counter()
        for _ in run_batch(engine, [request(prompt, options.tokens) for prompt in prompts[:count]]):
            pass
        return count * options.tokens / (time.perf_counter() - start)

    def peer() -> float:
        from mlx_lm.generate import generate_step  # after mlxlm has chosen the BLAS

        start = time.perf_counter()
        for _ in generate_step(mx.array(prompts[0]), model, max_tokens=options.tokens):
            pass
        return options.tokens / (time.perf_counter() - start)

    history = [(13 * j) % 1000 for j in range(options.turn)]
    last = [(31 * j) % 1000 for j in range(32)]
    engine = Engine(lm)
    engine.submit(request(history, 1, len(history) - 1)).result()

    def second_turn() -> float:
        start = time.perf_counter()
        assert engine.submit(request([*history, *last], 1)).result().cached_tokens >= options.turn - 1
        return time.perf_counter() - start

    def read_again() -> float:
        start = time.perf_counter()
        Engine(lm, prefix_cache_bytes=0).submit(request([*history, *last], 1)).result()
        return time.perf_counter() - start

    peaks: dict[str, int] = {}

    def with_peak(name: str, function: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            value = function()
            peaks[name] = max(peaks.get(name, 0), mx.get_peak_memory() - before)
            return value

        return run

    for count in options.clients:  # MLX compiles the graph of each number of texts
        together(count)
    peer()
    runs = {str(count): lambda count=count: together(count) for count in options.clients}
    runs |= {"mlx_lm": peer, "turn": second_turn, "again": read_again}
    measured = in_turn(options.rounds, **{name: with_peak(name, run) for name, run in runs.items()})
    return measured, sum(value.size for _, value in tree_flatten(model.parameters())), peaks


if __name__ == "__main__":
    main()
