"""Decoding: the bundled model's answers, cached against uncached logits, and speed as a share of memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mlxlm.backend.bandwidth import BytesPerToken, bandwidth_for, measure_bandwidth, weight_bytes
from mlxlm.backend.cpu_extension import load_extension
from mlxlm.backend.mlx import ON_CPU, eval_arrays, mx, nn, tree_map
from mlxlm.cache import KVOptions
from mlxlm.config import ModelConfig
from mlxlm.doctor.check import Check, CheckFailed, CheckSkipped
from mlxlm.doctor.sizes import BUNDLED_MODEL, Sizes
from mlxlm.evaluate.small_world import evaluate_small_world
from mlxlm.families import load_preset
from mlxlm.generation import Context, GenerationOptions, LoadedModel, Request, get_engine, load
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.kernels.dispatch import TOLERANCE, relative_distance
from mlxlm.model import Decoder
from mlxlm.plan.machines import measure_matmul
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.start import DEVICE_DTYPE

DECODING, MEMORY = "decoding", "memory and matrix products"  # sections
_MIN_RIGHT = 0.75  # of the bundled model's answers; it had 91% when it was made
_CHAIN, _REPEATS = 1000, 5  # kernels whose launches are timed, and how often
_CACHED_TOKENS = 8  # whose logits are compared
# Relative errors of logits. 28 layers of random weights had 0.02 with 8 bits and 0.15 with 4. With one token missing
# in the cache, the error was 0.7.
_MAX_ERROR = {None: 2 * TOLERANCE[DEVICE_DTYPE], 8: 0.06, 4: 0.3}


def memory_checks(sizes: Sizes) -> Iterator[Check]:
    """What limits decoding and training."""
    yield Check(MEMORY, "memory bandwidth", lambda: {"bytes_per_second": measure_bandwidth()})
    for dtype in ("float32",) if ON_CPU else ("float32", "bfloat16"):
        yield Check(MEMORY, f"products of {dtype} matrices", partial(_matmul, sizes.matrix, dtype))
    yield Check(MEMORY, "kernel launches", _launches)


def _matmul(size: int, dtype: str) -> dict[str, Any]:
    return {"size": size, "gflops": measure_matmul(size, dtype=dtype)}


def _launches() -> dict[str, Any]:
    """Time small kernels: many of which each needs the one before, as in a decoded token, and one alone."""

    def seconds(count: int) -> float:
        x = mx.array(1.0)
        for _ in range(count):
            x = mx.sin(x)
        start = time.perf_counter()
        mx.eval(x)
        return time.perf_counter() - start

    one, chain = (min(seconds(count) for _ in range(_REPEATS)) for count in (1, _CHAIN))
    each = (chain - one) / (_CHAIN - 1)
    return {"launches": _CHAIN, "microseconds_per_launch": 1e6 * each, "microseconds_of_one": 1e6 * one}


class DecodingChecks:
    """The checks of decoding, most of them with a larger model of random weights."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._models: dict[int | None, LoadedModel] = {}

    def __iter__(self) -> Iterator[Check]:
        yield Check(DECODING, "answers of the bundled model", self._check_answers)
        for bits, cache in ((None, "key-value cache"), (8, "8-bit key-value cache"), (4, "4-bit key-value cache")):
            yield Check(DECODING, f"{cache} against none", partial(self._check_cache, bits))
        for bits, weights in ((None, DEVICE_DTYPE), (4, "4-bit")):
            yield Check(DECODING, f"speed, {weights} weights", partial(self._measure, bits, None))
        for kv_bits in (8, 4):
            yield Check(
                DECODING, f"speed, {DEVICE_DTYPE} weights, {kv_bits}-bit cache", partial(self._measure, None, kv_bits)
            )

    def _check_answers(self) -> dict[str, Any]:
        scores = evaluate_small_world(load(BUNDLED_MODEL), self._sizes.questions)
        right, asked = (sum(getattr(score, name) for score in scores) for name in ("correct", "questions"))
        values = {"right": right, "questions": asked}
        if right < _MIN_RIGHT * asked:
            raise CheckFailed(f"{right} of {asked} answers are right, at least {_MIN_RIGHT:.0%} are expected", values)
        return values

    def _check_cache(self, bits: int | None) -> dict[str, Any]:
        """Compare the logits of the last tokens, decoded one by one, with those of a pass over all tokens."""
        ids, model = self._prompt, self._model().model
        uncached = model(mx.array([ids]))[0, -_CACHED_TOKENS:].astype(mx.float32)
        context = Context(model, KVOptions(key_bits=bits, value_bits=bits))
        context.read(ids[:-_CACHED_TOKENS])
        step = DecodeStep(model)
        rows = [step(mx.array([[token]], mx.int32), context.caches) for token in ids[-_CACHED_TOKENS:]]
        error, tolerance = relative_distance(mx.concatenate(rows), uncached), _MAX_ERROR[bits]
        values = {"error": error, "tolerance": tolerance, "tokens": len(ids)}
        if not error <= tolerance:
            raise CheckFailed(f"the relative error of the logits is {error:.2g}, above {tolerance:g}", values)
        return values

    def _measure(self, bits: int | None, kv_bits: int | None) -> dict[str, Any]:
        if bits is not None and ON_CPU and (reason := load_extension().unavailable_reason):
            raise CheckSkipped(f"quantized weights are dequantized: {reason}")
        lm = self._model(bits)
        kv = KVOptions(key_bits=kv_bits, value_bits=kv_bits)
        prompt, num_tokens, engine = self._prompt, self._sizes.tokens, get_engine(lm, kv)
        for shift in (1, 0):  # first, to compile and to warm up, another prompt of the same length
            ids = prompt[shift:] + prompt[:shift]
            request = Request(ids, GenerationOptions(max_tokens=num_tokens, temperature=0.0), frozenset())
            result = engine.submit(request).result()
        cache = engine.kv_bytes_for(len(prompt) + num_tokens // 2)
        read = BytesPerToken(weight_bytes(lm.model) or 0, cache)
        timings = result.timings
        bandwidth = bandwidth_for(read, timings.tokens_per_second or 0.0) or measure_bandwidth()
        values = {
            "parameters": self._config.parameter_count(),
            "prompt_tokens": result.prompt_tokens,
            "prompt_tokens_per_second": timings.prompt_tokens_per_second,
            "tokens": len(result.tokens),
            "tokens_per_second": timings.tokens_per_second,
            "bytes_per_token": read.total,
            "share_of_bandwidth": read.total * (timings.tokens_per_second or 0.0) / bandwidth,
            "peak_memory_bytes": timings.peak_memory_bytes,
        }
        if len(result.tokens) != num_tokens:
            raise CheckFailed(f"{len(result.tokens)} tokens were decoded instead of {num_tokens}", values)
        return values

    def _model(self, bits: int | None = None) -> LoadedModel:
        """A model with random weights, on 4 bits if requested, and the tokenizer of the bundled model."""
        if bits not in self._models:
            model = Decoder(self._config).eval()
            model.init_weights(0)
            dtype = getattr(mx, DEVICE_DTYPE)
            model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))
            if bits is not None:
                nn.quantize(model, group_size=64, bits=bits)
            eval_arrays(model.parameters())
            self._models[bits] = LoadedModel(model, self._tokenizer, self._config, Path("random-weights"))
        return self._models[bits]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load(BUNDLED_MODEL).tokenizer

    @cached_property
    def _config(self) -> ModelConfig:
        name, changes = self._sizes.decoding
        return load_preset(name, vocab_size=self._tokenizer.vocab_size, **changes)

    @property
    def _prompt(self) -> list[int]:
        """Tokens in an order that doesn't repeat, since equal tokens would hide exchanged positions."""
        size = self._config.vocab_size
        return [(17 * i) % (size - 10) + 10 for i in range(self._sizes.prompt)]
