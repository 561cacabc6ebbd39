"""How near decoding is to the machine's limit: the bytes that a token moves, over what memory delivers.

A decoded token reads every weight once, and the keys and values of every token before it: for one text at a time
that, not arithmetic, bounds its speed. Counted are these reads alone, as the arrays lie in memory (on a CPU,
dequantized); activations are not, so that the bytes are a lower bound and the share is never flattered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as
from mlxlm.utils.json_files import write_json

# Embeddings that also are the output of a model without a head of its own, by the names that architectures give them.
_TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in", "embedding", "embeddings")
_HEADS = ("lm_head", "output", "embed_out")
_LARGEST = 1 << 29  # bytes that are read to measure: many times what caches of processors hold
_ROUNDS = 5
_MOST_FILE = 1 << 20


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes that one decoded token reads: of the weights, and of the key-value caches at their mean length."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def bytes_read_per_token(model: nn.Module, caches: Sequence, generated: int) -> BytesPerToken | None:
    """What each of the last `generated` tokens of one text read, its caches being as they are now.

    None for a mixture of experts, which reads only some of its weights for a token.
    """
    weights = weight_bytes(model)
    return None if weights is None else BytesPerToken(weights, sum(_mean_bytes(cache, generated) for cache in caches))


def weight_bytes(model: nn.Module) -> int | None:
    """Bytes of the parameters that every token reads; None for a mixture of experts.

    An embedding is looked up, one row of it; whole it is read only where it is the output's matrix too.
    """
    parameters = tree_flatten(model.parameters())
    if any("expert" in name or "switch_mlp" in name for name, _ in parameters):
        return None
    has_head = any(part in _HEADS for name, _ in parameters for part in name.split("."))
    looked_up = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        and (has_head or name.rpartition(".")[2] not in _TOKEN_EMBEDDINGS)
    ]
    return sum(array.nbytes for name, array in parameters if not name.startswith(tuple(looked_up)))


def _mean_bytes(cache, generated: int) -> int:
    """Bytes that a cache of one text has held on average while the last `generated` tokens were added.

    One that doesn't grow with the text (a recurrent state) is read as a whole.
    """
    held = sum(array.nbytes for _, array in tree_flatten(cache.state) if isinstance(array, mx.array))
    size = cache.size() if hasattr(cache, "size") else 0
    if not size or not generated:
        return held
    generated = min(generated, cache.offset)
    lengths = (min(size, cache.offset - generated + n) for n in range(1, generated + 1))
    return round(held / size * sum(lengths) / generated)


def cached_bandwidth() -> float | None:
    """Bytes per second that were measured on this machine earlier; None if none were."""
    with suppress(MlxlmError):
        return _read().get(_machine())
    return None


def measure_bandwidth() -> float:
    """Bytes per second that this machine reads from its memory, in about half a second; kept for `cached_bandwidth`.

    The best of some reads of a buffer that no cache can hold: on a CPU by as many threads as it has cores, on a GPU
    by a sum over it. The best ever measured counts, since other work meanwhile can only make it less. Where it can't
    be kept, it is measured again next time.
    """
    size = min(_LARGEST, platform.total_memory() // 16)
    read = _cpu_reader(size) if ON_CPU else _gpu_reader(size)
    read()
    best = max(size / min(_seconds(read) for _ in range(_ROUNDS)), cached_bandwidth() or 0)
    with suppress(MlxlmError):
        file = _path()
        with os_errors_as(CheckpointError, "write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**_read(), _machine(): best})
    return best


def _cpu_reader(size: int) -> Callable[[], None]:
    cores = platform.cpu_cores()
    parts = np.array_split(np.ones(size // 8, np.int64), cores)

    def read() -> None:
        with ThreadPoolExecutor(cores) as threads:
            # Without arithmetic that could be what takes the time; numpy lets the other threads run meanwhile.
            list(threads.map(np.bitwise_or.reduce, parts))

    return read


def _gpu_reader(size: int) -> Callable[[], None]:
    buffer = mx.ones(size // 4)
    mx.eval(buffer)
    return lambda: mx.eval(buffer.sum())


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _path() -> Path:
    return platform.cache_folder() / "bandwidth.json"


@cache
def _machine() -> str:
    if ON_CPU:
        return f"{platform.chip()}, {platform.cpu_cores()} cores"
    return str(mx.device_info().get("device_name", platform.chip()))


def _read() -> dict[str, float]:
    """What was measured on any machine that shares this folder; what isn't a measurement is left out."""
    try:
        content = json.loads(read_bytes(_path(), _MOST_FILE, CheckpointError))
    except (MlxlmError, ValueError, RecursionError):
        return {}
    found = content if isinstance(content, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, float) and 1e6 < value < 1e15}
