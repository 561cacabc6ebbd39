"""Memory bandwidth: the bytes that a decoded token reads, and what the machine's memory delivers.

A decoded token reads every weight once, and the keys and values of every token before it. For a single sequence this,
not arithmetic, limits the speed. Only these reads are counted, with the dtypes that the arrays have in memory;
activations are not, so that the bytes are a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as
from mlxlm.utils.json_files import read_json_object, write_json

# Names of the token embedding, which is also the output matrix in models without one of the heads.
_TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in", "embedding", "embeddings")
_HEADS = ("lm_head", "output", "embed_out")
MIN_MODEL_BYTES = 100e6  # smaller weights are read from the processor's caches, and the overhead of a token counts
_BUFFER_BYTES = 1 << 29  # read to measure: many times the size of processor caches
_REPEATS = 5
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes of weights, and of key-value caches at their mean length, that one decoded token reads."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.cache


def weight_bytes(model: nn.Module) -> int | None:
    """Bytes of the parameters that every token reads; None for a mixture of experts, which reads only some.

    Of an embedding only one row is read, unless it is also the output matrix.
    """
    parameters = tree_flatten(model.parameters())
    if any("expert" in name or "switch_mlp" in name for name, _ in parameters):
        return None
    has_head = any(part in _HEADS for name, _ in parameters for part in name.split("."))
    lookups = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        and (has_head or name.rpartition(".")[2] not in _TOKEN_EMBEDDINGS)
    ]
    return sum(array.nbytes for name, array in parameters if not name.startswith(tuple(lookups)))


def cached_bandwidth() -> float | None:
    """Bytes per second measured on this machine earlier, or None."""
    with suppress(MlxlmError):
        return _read_measurements().get(_machine_name())
    return None


def bandwidth_for(read: BytesPerToken, tokens_per_second: float) -> float | None:
    """`cached_bandwidth`, measured again if decoding was faster than it allows: the machine was busy at that time."""
    bandwidth, used = cached_bandwidth(), read.total * tokens_per_second
    if bandwidth is None or used <= bandwidth or read.weights < MIN_MODEL_BYTES:
        return bandwidth
    return measure_bandwidth(at_least=used)


def measure_bandwidth(at_least: float = 0.0) -> float:
    """Measure the bytes per second that this machine reads from memory, and save it for `cached_bandwidth`.

    Takes about half a second: the best of several reads of a large buffer, on a CPU by one thread per core, on a GPU by
    a sum. The best of all earlier measurements and `at_least` counts, since other processes can only lower it.
    """
    size = min(_BUFFER_BYTES, platform.total_memory() // 16)
    read = _cpu_reader(size) if ON_CPU else _gpu_reader(size)
    read()
    bandwidth = max(size / min(_seconds(read) for _ in range(_REPEATS)), cached_bandwidth() or 0, at_least)
    with suppress(MlxlmError):
        file = _path()
        with os_errors_as(CheckpointError, "write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**_read_measurements(), _machine_name(): bandwidth})
    return bandwidth


def _cpu_reader(size: int) -> Callable[[], None]:
    cores = platform.cpu_cores()
    parts = np.array_split(np.ones(size // 8, np.int64), cores)

    def read() -> None:
        with ThreadPoolExecutor(cores) as threads:
            # A bitwise or is faster than memory, and numpy releases the GIL.
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
def _machine_name() -> str:
    if ON_CPU:
        return f"{platform.chip()}, {platform.cpu_cores()} cores"
    return str(mx.device_info().get("device_name", platform.chip()))


def _read_measurements() -> dict[str, float]:
    """Measurements by machine, of all machines that share this folder; invalid values are omitted."""
    try:
        content = read_json_object(_path(), _MAX_FILE_BYTES, CheckpointError)
    except MlxlmError:
        return {}
    return {name: value for name, value in content.items() if isinstance(value, float) and 1e6 < value < 1e15}
