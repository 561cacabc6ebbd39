"""Host time per decoded token: how long Python takes to build a token's graph, which a GPU can't hide if it is faster.

    python benchmarks/host_time.py [--layers 8 30] [--batches 1 8] [--tokens 100] [--rounds 5] [--classes]

With --classes, tiny models of mlx_lm's classes, one for each kind of cache, with `DecodeStep` and without it.

Tiny Llama models with the same weights in mlxlm (`DecodeStep`, and the model without it) and in mlx_lm, in turn in one
process. Each token is built, timed, and then evaluated outside of the timing. On a CPU, RoPE, norms and attention are
many operations, on a GPU one each, so that the times on a GPU are shorter for all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from common import in_turn, median, report, spread

from mlxlm.backend.mlx import mx, tree_flatten, tree_unflatten
from mlxlm.cache import make_cache
from mlxlm.config import ModelConfig
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model import Decoder

PROMPT = 10  # tokens
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
# Models of mlx_lm's classes: full attention, windows, latent attention, a recurrent state in three of four layers.
CLASSES = {
    "helium": {"attention_bias": False, "mlp_bias": False},
    "gemma3_text": {"sliding_window": 128, "sliding_window_pattern": 4},
    "minicpm3": {
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0, "tie_word_embeddings": False,
    },
    "olmo_hybrid": {
        "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "attention_bias": False,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 30])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--classes", action="store_true")
    options = parser.parse_args()
    rows, result = [], {}
    for kind in CLASSES if options.classes else ():
        model = make_class(kind)
        for batch in options.batches:
            steps_of_kind = class_steps(model, batch, options.tokens)
            times = in_turn(options.rounds, **steps_of_kind)
            ratio = median([a / b for a, b in zip(times["mlxlm"], times["without DecodeStep"], strict=True)])
            rows.append(
                (f"{kind}, batch {batch}", f"{spread([1e3 * t for t in times['mlxlm']])} ms, {ratio:.2f} x without")
            )
            result[f"{kind}, batch {batch}"] = round(ratio, 3)
    for layers in () if options.classes else options.layers:
        ours, peer = make_models(layers)
        for batch in options.batches:
            times = in_turn(options.rounds, **steps(ours, peer, batch, options.tokens))
            case = f"{layers} layers, batch {batch}"
            for name, values in times.items():
                ratio = median([a / b for a, b in zip(values, times["mlx_lm"], strict=True)])
                rows.append(
                    (f"{case}: {name}", f"{spread([1e3 * value for value in values])} ms, {ratio:.2f} x mlx_lm")
                )
                result[f"{case}: {name}"] = [round(1e3 * median(values), 4), round(ratio, 3)]
    report("host time per token: medians; times mlx_lm's", rows, {"benchmark": "host_time", "cases": result})


def make_models(layers: int) -> tuple[Decoder, object]:
    from mlx_lm.models.llama import Model, ModelArgs

    config = ModelConfig(
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        tie_word_embeddings=True, **SIZES,
    )  # fmt: skip
    ours = Decoder(config)
    ours.init_weights(0)
    ours.eval()
    peer = Model(
        ModelArgs(
            model_type="llama", num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
            rms_norm_eps=config.rms_norm_eps, rope_theta=config.rope_theta, tie_word_embeddings=True, **SIZES,
        )
    )  # fmt: skip
    peer.update(tree_unflatten(tree_flatten(ours.parameters())))
    peer.eval()
    mx.eval(ours.parameters(), peer.parameters())
    return ours, peer


def make_class(kind: str) -> object:
    from mlxlm.checkpoint.mlx_lm.model import build_model

    sizes = {**SIZES, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    model, _ = build_model({"model_type": kind, **sizes, **common, **CLASSES[kind]})
    model.eval()
    mx.eval(model.parameters())
    return model


def class_steps(model: object, batch: int, tokens: int) -> dict[str, Callable[[], float]]:
    step, token, prompt = DecodeStep(model), mx.array([[5]] * batch), mx.array([[1] * PROMPT] * batch)
    make = partial(make_cache, model)
    return {
        "mlxlm": lambda: measure(model, prompt, make, lambda caches: step(token, caches), tokens),
        "without DecodeStep": lambda: measure(
            model, prompt, make, lambda caches: model(token, cache=caches)[:, -1], tokens
        ),
    }


def measure(model: Callable, prompt: mx.array, make: Callable, forward: Callable, tokens: int) -> float:
    """Seconds of this thread to build the graph of a token."""
    caches, times = make(), []
    mx.eval(model(prompt, cache=caches))
    for _ in range(tokens):
        start = time.thread_time()  # not what other processes take
        logits = forward(caches)
        times.append(time.thread_time() - start)
        mx.eval(logits)
    return median(times)


def steps(ours: Decoder, peer: object, batch: int, tokens: int) -> dict[str, Callable[[], float]]:
    from mlx_lm.models.cache import make_prompt_cache

    step, token, prompt = DecodeStep(ours), mx.array([[5]] * batch), mx.array([[1] * PROMPT] * batch)

    return {
        "mlxlm": lambda: measure(ours, prompt, lambda: make_cache(ours), lambda caches: step(token, caches), tokens),
        "mlxlm without DecodeStep": lambda: measure(
            ours, prompt, lambda: make_cache(ours), lambda caches: ours(token, cache=caches)[:, -1], tokens
        ),
        "mlx_lm": lambda: measure(
            peer, prompt, lambda: make_prompt_cache(peer), lambda caches: peer(token, cache=caches)[:, -1], tokens
        ),
    }


if __name__ == "__main__":
    main()
