"""Memory for inference: the weights and the key-value cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.counts import count_parameters, kv_cache_values, recurrent_state_bytes, sublayers
from mlxlm.config.numbers import MAX_SIZE
from mlxlm.config.option import option, range_problems
from mlxlm.config.quantization import module_quantization, packed_bytes
from mlxlm.config.sublayers import LATENT_FIELDS
from mlxlm.config.tensor_parallel import sent_values_per_token, split_config
from mlxlm.plan.machines import Machine
from mlxlm.plan.training import DEVICES
from mlxlm.utils.errors import ConfigError

BITS = (32, 16, 8, 6, 5, 4, 3, 2)
CACHE_BITS = (32, 16, 8, 4)
_GROUP_SIZES = (32, 64, 128)
_MAX_COUNT = 2**40 - 1
EXAMPLE_WINDOW = 4096  # sliding window to compare with, for a model without one (Mistral 7B's)


@dataclass(frozen=True)
class Serving:
    """How a model is used.

    Norms, scales and biases, which are not quantized, have 32 bits on a CPU and 16 elsewhere.

    Raises:
        ConfigError: MLX doesn't have a value. The message names all of them.
    """

    bits: int = option(16, "Bits per weight in memory.", choices=BITS)
    group_size: int | None = option(None, "Of quantized weights. None: the model's own, or 64.", choices=_GROUP_SIZES)
    num_sequences: int = option(1, "Sequences that are generated at the same time.", low=1, high=_MAX_COUNT)
    context_length: int = option(4096, "Tokens of each sequence.", low=1, high=_MAX_COUNT)
    kv_bits: int = option(16, "Bits per element of the key-value cache.", choices=CACHE_BITS)
    device: str = option("cuda", "Device that generates.", choices=DEVICES)
    num_hosts: int = option(1, "Machines that share the model (tensor parallelism).", low=1, high=_MAX_COUNT)

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise ConfigError("invalid inference settings: " + "; ".join(problems))

    @property
    def float_bytes(self) -> int:
        """Bytes of an element that isn't quantized."""
        return 4 if self.device == "cpu" else 2


def default_serving(machine: Machine, config: ModelConfig) -> Serving:
    """Return mlxlm's defaults on a machine.

    Weights and cache have 16 bits, or 32 on a CPU if the weights fit; a quantized model keeps its bits. One sequence of
    4,096 tokens, or of `max_position_embeddings` if that is less.
    """
    quantized = quantized_bits(config)
    bits = 32 if machine.device_type == "cpu" and (quantized or _fits_float32(config, machine.memory)) else 16
    return Serving(
        bits=quantized or bits,
        kv_bits=bits,
        context_length=min(Serving.context_length, config.max_position_embeddings),
        device=machine.device_type,
    )


def with_loaded_bits(serving: Serving, config: ModelConfig, memory: int | None) -> Serving:
    """Return the settings with the bits that weights and cache have once the model is loaded.

    On a CPU, weights that aren't quantized in MLX's affine format are loaded as float32 if they fit in its memory. A
    float cache is float32 then, and also with quantized weights.
    """
    if serving.device != "cpu":
        return serving
    stays = serving.bits < 16 and _default_format(config).get("mode", "affine") == "affine"
    bits = 32 if not stays and _fits_float32(config, memory) else serving.bits
    return replace(serving, bits=bits, kv_bits=32 if serving.kv_bits == 16 and bits != 16 else serving.kv_bits)


def quantized_bits(config: ModelConfig) -> int | None:
    """Return the bits of most matrices of a quantized model, or None."""
    return _default_format(config).get("bits")


def _default_format(config: ModelConfig) -> dict[str, Any]:
    """Return the format of most matrices of a quantized model, or {} if the model isn't quantized."""
    return (module_quantization(config.quantization, "") if config.quantization else None) or {}


def _fits_float32(config: ModelConfig, memory: int | None) -> bool:
    """Return whether the weights fit in `memory` bytes as float32."""
    from mlxlm.checkpoint.load import fits_on_cpu

    return memory is None or fits_on_cpu(4 * config.parameter_count(), memory)


@dataclass(frozen=True)
class InferenceMemory:
    """Memory for inference, in bytes.

    Attributes:
        weights: All weights.
        bits_per_weight: Mean bits per weight, with scales and biases.
        cache: The key-value cache and the recurrent states of all sequences.
        cache_per_token: Keys and values of one token.
        caches: The cache with other kinds of attention, by name, the model's own among them.
        bytes_per_step: What a decoding step reads: the cache, and the weights without embeddings that aren't the head.
        sent_per_token: What a machine sends to the others for each token.
    """

    weights: int
    bits_per_weight: float
    cache: int
    cache_per_token: int
    caches: dict[str, int]
    bytes_per_step: int
    sent_per_token: int

    @property
    def total(self) -> int:
        """Bytes of weights and cache."""
        return self.weights + self.cache


def inference_memory(config: ModelConfig, serving: Serving) -> InferenceMemory:
    """Estimate the memory for inference, on each of the machines that share the model.

    Raises:
        ConfigError: They can't share it.
    """
    sent = sent_values_per_token(config, serving.num_hosts) * serving.float_bytes
    config = config if serving.num_hosts == 1 else split_config(config, serving.num_hosts)
    weights = weight_bytes(config, serving)
    cache, count = cache_bytes(config, serving), config.parameter_count()
    parameters = count_parameters(config)
    unread = parameters.get("per_layer_embedding", 0)
    unread += 0 if config.tie_word_embeddings else parameters["embedding"]
    for sublayer, layers in sublayers(config):
        for matrix in sublayer.matrices:  # the experts that none of the sequences goes to, if all are as likely
            missed = (1 - matrix.experts_per_token / matrix.experts) ** serving.num_sequences
            unread += int(layers * matrix.parameters * missed)
    return InferenceMemory(
        weights=weights,
        bits_per_weight=8 * weights / count,
        cache=cache,
        cache_per_token=_kv_bytes(config, replace(serving, num_sequences=1, context_length=1)),
        caches={name: cache_bytes(other, serving) for name, other in _kinds(config).items()},
        bytes_per_step=weights * (count - unread) // count + cache,
        sent_per_token=sent,
    )


def weight_bytes(config: ModelConfig, serving: Serving) -> int:
    """Return the bytes of all weights.

    Quantized matrices have a scale and a bias per group, or one byte for both in floating-point formats. If the bits
    and the group size are those of most matrices of a quantized model, each matrix has its own format. Otherwise the
    formats are those of `mlxlm quantize`, which reduces the group size for matrices that it doesn't divide.
    """
    count = config.parameter_count()
    if serving.bits >= 16:
        return count * serving.bits // 8
    quantization, default = config.quantization, _default_format(config)
    if default.get("bits") != serving.bits or serving.group_size not in (None, default["group_size"]):
        quantization = None  # other formats than the model's own
    total = serving.float_bytes * count
    for module, width, parameters in _matrices(config):
        form = module_quantization(quantization, module) if quantization else _affine(serving, width)
        if form is not None and width % form["group_size"] == 0:
            total += packed_bytes(parameters, form, serving.float_bytes) - parameters * serving.float_bytes
    return total


def _affine(serving: Serving, width: int) -> dict[str, Any] | None:
    """Return the format of a matrix whose rows have `width` elements, or None if no group size divides them."""
    sizes = (size for size in reversed(_GROUP_SIZES) if size <= (serving.group_size or 64) and width % size == 0)
    return next(({"bits": serving.bits, "group_size": size, "mode": "affine"} for size in sizes), None)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield (module, row width, parameters) of each matrix that can be quantized."""
    parameters, hidden = count_parameters(config), config.hidden_size
    yield "model.embed_tokens", hidden, parameters["embedding"]
    if parameters["positions"]:
        yield "model.embed_positions", hidden, parameters["positions"]
    if config.hidden_size_per_layer_input:
        yield "model.embed_tokens_per_layer", config.per_layer_width, parameters["per_layer_embedding"]
        yield "model.per_layer_model_projection", hidden, parameters["per_layer_projection"]
    if parameters["head"]:
        yield "lm_head", hidden, parameters["head"]
    for layer, kind in enumerate(config.layer_sublayers):
        for matrix in (m for sublayer in kind for m in sublayer.matrices if m.group != "convolution"):
            yield f"model.layers.{layer}.{matrix.module}", matrix.inputs, matrix.parameters


def cache_bytes(config: ModelConfig, serving: Serving) -> int:
    """Return the bytes of the key-value cache and the recurrent states, which aren't quantized, of all sequences.

    Raises:
        ConfigError: No group size divides the head dim.
    """
    states = recurrent_state_bytes(config, max(serving.kv_bits // 8, serving.float_bytes))
    return _kv_bytes(config, serving) + states * serving.num_sequences


def _kv_bytes(config: ModelConfig, serving: Serving) -> int:
    """Return the bytes of keys and values. Quantized, each 64 or 32 elements of a head have a scale and a bias."""
    values = sum(kv_cache_values(config, serving.context_length)) * serving.num_sequences
    if serving.kv_bits >= 16:
        return values * serving.kv_bits // 8
    dims = {dim for mixer, *_ in config.layer_sublayers for dim in mixer.kv_dims}
    group = next((size for size in (64, 32) if all(dim % size == 0 for dim in dims)), None)
    if group is None:
        sizes = " and ".join(str(dim) for dim in sorted(dims))
        raise ConfigError(f"a cache of head dim {sizes} can't be quantized, it must be a multiple of 32", "16 bits")
    return values * serving.kv_bits // 8 + values // group * 2 * serving.float_bytes


def _kinds(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the model with each kind of attention."""
    if config.kv_lora_rank is not None:
        multi_head = config.with_changes(**dict.fromkeys(LATENT_FIELDS))
        return {"multi-head": multi_head, f"latent, of rank {config.kv_lora_rank}": config}
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    # A window that no text fills: the layers' sizes can depend on whether they have one.
    plain = config if config.sliding_window is None else config.with_changes(sliding_window=MAX_SIZE)
    kinds = {"multi-head": plain.with_changes(num_key_value_heads=heads, num_global_key_value_heads=None)}
    if 1 < kv < heads:
        kinds[f"grouped-query, {kv} key-value heads"] = plain
    kinds["multi-query"] = plain.with_changes(num_key_value_heads=1, num_global_key_value_heads=None)
    if config.sliding_window is None:
        types = config.layer_types and tuple(SLIDING if kind == FULL else kind for kind in config.layer_types)
        windowed = config.with_changes(sliding_window=EXAMPLE_WINDOW, layer_types=types)
        kinds[f"sliding window of {EXAMPLE_WINDOW} in all layers" + (" with attention" if types else "")] = windowed
    else:
        local = sum(config.window(layer) is not None for layer in range(config.num_hidden_layers))
        kinds[f"sliding window of {config.sliding_window} in {local} layers"] = config
    return kinds
