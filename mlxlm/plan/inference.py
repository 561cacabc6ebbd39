"""Memory that a model takes when it is used: its weights at some number of bits, and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.config import ModelConfig, counts
from mlxlm.config.quantization import module_quantization, packed_bytes
from mlxlm.plan.machines import Machine
from mlxlm.plan.training import DEVICES
from mlxlm.utils.errors import ConfigError

BITS = (32, 16, 8, 6, 5, 4, 3, 2)
CACHE_BITS = (32, 16, 8, 4)
WINDOW = 4096  # of the table's sliding window, for a model without one (Mistral 7B's)


@dataclass(frozen=True)
class Serving:
    """bits of a weight in memory, in groups of `group_size` where quantized (None: the model's own, or 64); `num_sequences`
    side by side, of `context_length` tokens each; kv_bits of a cached number; device: "cpu", "metal" or "cuda". What isn't
    quantized (norms, scales, biases) has 32 bits on a CPU, elsewhere 16. Raises ConfigError for what MLX doesn't
    have."""

    bits: int = 16
    group_size: int | None = None
    num_sequences: int = 1
    context_length: int = 4096
    kv_bits: int = 16
    device: str = "cuda"

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, it must be one of {', '.join(str(x) for x in allowed if x is not None)}"
            for name, value, allowed in (
                ("bits", self.bits, BITS), ("group_size", self.group_size, (None, 32, 64, 128)),
                ("kv_bits", self.kv_bits, CACHE_BITS), ("device", self.device, DEVICES),
            )
            if value not in allowed
        ]  # fmt: skip
        problems += [
            f"{name} is {value!r}, it must be a whole number from 1 to {2**40 - 1:,}"
            for name, value in (("num_sequences", self.num_sequences), ("context_length", self.context_length))
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**40
        ]
        if problems:
            raise ConfigError("this use can't be planned: " + "; ".join(problems))

    @property
    def float_bytes(self) -> int:
        """Of a number that isn't quantized."""
        return 4 if self.device == "cpu" else 2


def default_serving(machine: Machine, config: ModelConfig) -> Serving:
    """What mlxlm does there unless asked: weights and cache have 16 bits, on a CPU 32 where the weights fit, and a
    quantized model has its own. A text of 4,096 tokens, or as many as the model has positions."""
    bits = 32 if machine.kind == "cpu" and _widened(config, machine.memory) else 16
    return Serving(
        bits=quantized_bits(config) or bits,
        kv_bits=bits,
        context_length=min(Serving.context_length, config.max_position_embeddings),
        device=machine.kind,
    )


def with_loaded_bits(serving: Serving, config: ModelConfig, memory: int | None) -> Serving:
    """The same with the bits that there are once the model is loaded: on a CPU weights have 32 where these fit its
    memory, and so has a cache of floats, also beside quantized weights, whose scales have 32 there."""
    if serving.device != "cpu":
        return serving
    bits = 32 if _widened(config, memory) else serving.bits
    return replace(serving, bits=bits, kv_bits=32 if serving.kv_bits == 16 and bits != 16 else serving.kv_bits)


def quantized_bits(config: ModelConfig) -> int | None:
    """Of most matrices of a quantized model."""
    return module_quantization(config.quantization, "")["bits"] if config.quantization else None


def _widened(config: ModelConfig, memory: int | None) -> bool:
    """Whether a CPU with so much memory loads the weights in float32."""
    from mlxlm.checkpoint.load import fits_float32

    return memory is None or fits_float32(config, memory)


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes. `caches`: what the cache would be with other kinds of attention, this model's own among them."""

    weights: int
    bits_per_weight: float
    cache: int
    cache_per_token: int
    caches: dict[str, int]

    @property
    def total(self) -> int:
        return self.weights + self.cache


def inference_memory(config: ModelConfig, serving: Serving) -> InferenceMemory:
    weights = weight_bytes(config, serving)
    cache = cache_bytes(config, serving)
    return InferenceMemory(
        weights=weights,
        bits_per_weight=8 * weights / config.parameter_count(),
        cache=cache,
        cache_per_token=cache_bytes(config, replace(serving, num_sequences=1, context_length=1)),
        caches={name: cache_bytes(other, serving) for name, other in _kinds(config).items()},
    )


def weight_bytes(config: ModelConfig, serving: Serving) -> int:
    """All weights: in 32 or 16 bits, or matrices and embeddings quantized to fewer, with a scale and a bias for each
    group of a row, or one byte for both in a format of floats.

    With the bits and groups that most matrices of a quantized model have, each has its own format, but for those that
    its group size doesn't divide. Otherwise as `mlxlm quantize` does, which finds a smaller one for these.
    """
    count = config.parameter_count()
    if serving.bits >= 16:
        return count * serving.bits // 8
    most = module_quantization(config.quantization, "") if config.quantization else {}
    own = most.get("bits") == serving.bits and serving.group_size in (None, most["group_size"])
    total = serving.float_bytes * count
    for module, width, parameters in _matrices(config):
        chosen = module_quantization(config.quantization, module) if own else _affine(serving, width)
        if chosen is not None and width % chosen["group_size"] == 0:
            total += packed_bytes(parameters, chosen, serving.float_bytes) - parameters * serving.float_bytes
    return total


def _affine(serving: Serving, width: int) -> dict[str, Any] | None:
    """The format of a matrix with rows of this width."""
    sizes = (size for size in (128, 64, 32) if size <= (serving.group_size or 64) and width % size == 0)
    return next(({"bits": serving.bits, "group_size": size, "mode": "affine"} for size in sizes), None)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(the decoder's module, width of a row, parameters) of each matrix that can be quantized."""
    found, hidden, layers = counts.count_parameters(config), config.hidden_size, config.num_hidden_layers
    yield "model.embed_tokens", hidden, found["embedding"]
    if found["positions"]:
        yield "model.embed_positions", hidden, found["positions"]
    if found["head"]:
        yield "lm_head", hidden, found["head"]
    heads, inner = config.num_attention_heads * config.head_dim, config.intermediate_size
    attention = {"q": (hidden, "query"), "k": (hidden, "key"), "v": (hidden, "value"), "o": (heads, "output")}
    feed_forward = {**({"gate": hidden} if config.mlp_gated else {}), "up": hidden, "down": inner}
    for layer in range(layers):
        for name, (width, part) in attention.items():
            yield f"model.layers.{layer}.self_attn.{name}_proj", width, found[part] // layers
        for name, width in feed_forward.items():
            yield f"model.layers.{layer}.mlp.{name}_proj", width, hidden * inner


def cache_bytes(config: ModelConfig, serving: Serving) -> int:
    """Keys and values of all texts. Quantized ones have a scale and a bias for each group of a head's numbers, 64 of
    them or 32. Raises ConfigError for a head that neither divides."""
    values = counts.kv_cache_values(config, serving.context_length) * serving.num_sequences
    if serving.kv_bits >= 16:
        return values * serving.kv_bits // 8
    group = next((size for size in (64, 32) if config.head_dim % size == 0), None)
    if group is None:
        raise ConfigError(
            f"a cache of head dim {config.head_dim} can't be quantized, which takes a multiple of 32", "16 bits"
        )
    return values * serving.kv_bits // 8 + values // group * 2 * serving.float_bytes


def _kinds(config: ModelConfig) -> dict[str, ModelConfig]:
    """The same model with each kind of attention."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    plain = config.with_changes(sliding_window=None, layer_types=None)
    kinds = {"multi-head": plain.with_changes(num_key_value_heads=heads)}
    if 1 < kv < heads:
        kinds[f"grouped-query, {kv} key-value heads"] = plain
    kinds["multi-query"] = plain.with_changes(num_key_value_heads=1)
    if config.sliding_window is None:
        kinds[f"sliding window of {WINDOW} in all layers"] = config.with_changes(sliding_window=WINDOW)
    else:
        local = sum(config.window(layer) is not None for layer in range(config.num_hidden_layers))
        kinds[f"sliding window of {config.sliding_window} in {local} layers"] = config
    return kinds
