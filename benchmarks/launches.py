"""Kernels that a GPU launches per token, bytes that it reads, and the speeds predicted from both. Not a timing.

    python benchmarks/launches.py [MODEL ...] [--bits 4] [--context 500]

A model is a name or a folder, as for `mlxlm plan`; of a name nothing but its configuration is used. The launches are
those of MLX's Metal backend for the graphs of mlxlm and mlx_lm, counted on a simulated M2 Max by `tests/launches.py`:
a decoding step of one row, and the draw of its token. The weights are zeros, of two layers.

The speeds are predictions by

    seconds per token = bytes / (0.91 x bandwidth) + 3.3 us x launches

which was fitted to published figures of mlx_lm for Qwen3-4B on an M4 Max, where it is within 1 %. The share of the
nominal bandwidth and the time per launch are assumed to be the same on all chips. Host time isn't part of it
(`host_time.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulated_gpu.install import simulate  # noqa: E402

simulate("simulated-m2", "mlx")  # before MLX is imported

from mlxlm.backend.mlx import mx  # noqa: E402
from mlxlm.config import ModelConfig  # noqa: E402
from mlxlm.families.config_conversion import config_to_hf  # noqa: E402
from mlxlm.generation import GenerationOptions  # noqa: E402
from mlxlm.plan.inference import Serving, inference_memory  # noqa: E402
from mlxlm.plan.machines import MACHINES  # noqa: E402
from mlxlm.plan.model_lookup import find_config  # noqa: E402
from tests import launches  # noqa: E402

BANDWIDTH_SHARE, SECONDS_PER_LAUNCH = 0.498 / 0.546, 3.3e-6
PARTS = {
    "projections": ("QuantizedMatmul", "Matmul"),
    "norms": ("RMSNorm", "LayerNorm", "add_rms_norm"),
    "RoPE": ("RoPE", "qk_norm_rope"),
    "attention": (
        "ScaledDotProductAttention",
        "attention_decode",
        "attention_decode_quantized",
        "attention_decode_combine",
    ),
    "cache writes": ("ScatterAxis", "SliceUpdate", "DynamicSliceUpdate"),
    "feed-forward, element-wise": ("Compiled", "Multiply", "Sigmoid"),
    "residual additions": ("Add",),
    "copies": ("copy",),
}
TOP_K, TOP_P, MIN_P, XTC = {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"xtc_probability": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p": TOP_P,
    "top-k": TOP_K,
    "top-k, top-p": {**TOP_K, **TOP_P},
    "min-p": MIN_P,
    "min-p, top-p": {**MIN_P, **TOP_P},
    "typical": {"typical_p": 0.9},
    "XTC": XTC,
    "repetition penalty": {"repetition_penalty": 1.1},
    "presence, frequency penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["llama3.2-1b", "qwen3-4b"], metavar="MODEL")
    parser.add_argument("--bits", type=int, default=4, help="of the weights, 16 for bfloat16")
    parser.add_argument("--context", type=int, default=500, help="tokens in the cache")
    options = parser.parse_args()
    rows, result = [], {}
    for name in options.models:
        config = replace(find_config(name), quantization=None)
        values = result[name] = measure(config, options.bits, options.context)
        rows += [(f"{name}: {what}", text) for what, text in describe(config, values)]
    title = "launches on a simulated M2 Max: mlxlm / mlx_lm"
    report(title, rows, {"benchmark": "launches", "models": result})


def measure(config: ModelConfig, bits: int, context: int) -> dict[str, Any]:
    ours = partial(launches.decode_launches, context=context, bits=bits)
    forward = [step(config, ours), step(config, partial(mlx_lm_launches, context=context, bits=bits))]
    sampler = {name: [ours_draw(config, values), mlx_lm_draw(config, values)] for name, values in SETTINGS.items()}
    serving = Serving(bits=bits, group_size=64 if bits < 16 else None, context_length=context, device="metal")
    nbytes = inference_memory(config, serving).bytes_per_step
    totals = [
        sum(counts["layer"].values()) * config.num_hidden_layers + sum(counts["rest"].values()) for counts in forward
    ]
    speeds = {
        machine.name: {
            name: [round(1 / seconds(nbytes, totals[i] + sampler[name][i], machine.bandwidth), 1) for i in (0, 1)]
            for name in ("greedy", "top-p")
        }
        for machine in MACHINES.values() if machine.device_type == "metal"
    }  # fmt: skip
    return {"bytes": nbytes, "model": totals, "parts": forward, "sampler": sampler, "tokens_per_second": speeds}


def seconds(nbytes: int, count: int, bandwidth: float) -> float:
    return nbytes / (BANDWIDTH_SHARE * bandwidth) + SECONDS_PER_LAUNCH * count


def describe(config: ModelConfig, values: dict[str, Any]) -> list[tuple[str, str]]:
    ours, peer = values["parts"]
    rows = [("bytes per token", f"{values['bytes'] / 1e9:.3f} GB")]
    rows.append(("launches per token without the draw", " / ".join(map(str, values["model"]))))
    for place in ours:
        rows.append((f"{place}, all", f"{sum(ours[place].values())} / {sum(peer[place].values())}"))
        parts = sorted(ours[place] | peer[place])
        rows += [(f"{place}, {part}", f"{ours[place].get(part, 0)} / {peer[place].get(part, 0)}") for part in parts]
    for name, (mine, other) in values["sampler"].items():
        rows.append((f"draw, {name}", f"{mine} / {'-' if other is None else other}"))
    for machine, speeds in values["tokens_per_second"].items():
        texts = (f"{name} {mine:.0f} / {other:.0f}" for name, (mine, other) in speeds.items())
        rows.append((f"predicted tokens/s, {machine}", ", ".join(texts)))
    return rows


def step(config: ModelConfig, count: Callable[[ModelConfig], Counter[str]]) -> dict[str, dict[str, int]]:
    """The launches of a layer by part, and those outside of the layers."""
    one, two = (count(replace(config, num_hidden_layers=layers, layer_types=None)) for layers in (1, 2))
    layer = two - one
    return {"layer": by_part(layer), "rest": by_part(one - layer)}


def by_part(counts: Counter[str]) -> dict[str, int]:
    names = {name: part for part, members in PARTS.items() for name in members}
    parts: Counter[str] = Counter()
    for name, number in counts.items():
        parts[names.get(name, "other")] += number
    return dict(parts)


def mlx_lm_launches(config: ModelConfig, context: int, bits: int) -> Counter[str]:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    values = config_to_hf(config)
    model_class, arguments = _get_classes(values)
    model = model_class(arguments.from_dict(values))
    launches.set_zero_weights(model, bits)
    caches = make_prompt_cache(model)
    keys = mx.zeros((1, config.num_key_value_heads, context, config.head_dim), mx.bfloat16)
    for cache in caches:
        cache.update_and_fetch(keys, keys)
    return launches.step_launches(lambda token: model(token, cache=caches)[:, -1], caches)


def ours_draw(config: ModelConfig, values: dict[str, Any]) -> int:
    options = GenerationOptions(**{"temperature": 0.7, **values})
    return launches.sampler_launches(options, config.vocab_size).total()


def mlx_lm_draw(config: ModelConfig, values: dict[str, Any]) -> int | None:
    """As `generate_step` in mlx_lm/generate.py draws. None for what mlx_lm doesn't have."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    if "typical_p" in values:
        return None
    penalties = {name: value for name, value in values.items() if name.endswith("penalty")}
    sampler = (
        make_sampler(0.7, **{name: x for name, x in values.items() if name not in penalties})
        if "temperature" not in values
        else make_sampler(0.0)
    )
    processors = make_logits_processors(**penalties)
    logits, tokens, last = mx.zeros((1, config.vocab_size), mx.bfloat16), mx.arange(100), mx.array([5])
    mx.eval(logits, tokens, mx.random.state)
    with launches.recording():
        if processors:
            tokens = mx.concat([tokens, last])
        for processor in processors:
            logits = processor(tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return launches.count_launches(sampler(logprobs), logprobs.squeeze(0), tokens).total()


if __name__ == "__main__":
    main()
