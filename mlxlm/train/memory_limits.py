"""The memory of a run: whether it fits the machine, and limits on what MLX keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from mlxlm.backend import device
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.generation.device_memory import wired_limit
from mlxlm.plan import Training, suggest_change, training_memory
from mlxlm.plan.advice import usable_memory
from mlxlm.train.distillation import teacher_bytes
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.formatting import human_bytes

_INITIAL_CACHE = 1 << 30  # bytes of freed buffers that MLX keeps on a CPU, until a step has shown what it needs


def fits_memory(config: ModelConfig, settings: TrainSettings) -> bool:
    """Whether the device has the memory for one process to train `config`, by `mlxlm.plan`."""
    return _needed(config, settings) <= usable_memory(device.device_memory())


def check_memory(config: ModelConfig, settings: TrainSettings, preset: str = "--preset") -> None:
    """Raise ConfigError unless `fits_memory`. The hint is by `suggest_change`, which explains `preset`."""
    training, memory = Training.from_settings(settings), device.device_memory()
    needed = _needed(config, settings)
    if memory is None or needed <= usable_memory(memory):
        return
    change = suggest_change(config, training, memory, preset)
    hint = f"{change.text}, which takes {human_bytes(change.peak_memory)}" if change else "a smaller model"
    available = human_bytes(usable_memory(memory))
    raise ConfigError(f"training takes about {human_bytes(needed)} of memory, {available} are available", hint)


def _needed(config: ModelConfig, settings: TrainSettings) -> int:
    teacher = 0 if settings.teacher is None else teacher_bytes(settings.teacher, settings.dtype)
    return training_memory(config, Training.from_settings(settings)).total + teacher


@contextmanager
def memory_limits() -> Iterator[None]:
    """Limit memory during a run: on a CPU the buffers that MLX keeps, on Metal all that it takes.

    On Metal it takes no more than macOS recommends (shared by the processes of `--num-processes`), which stays in
    memory. MLX's own limit there is 1.5 times that: it would keep freed buffers until the machine pages, and only then
    give them back. This has not been measured yet.
    """
    if not ON_CPU and not mx.metal.is_available():
        yield
        return
    set_limit, limit = (mx.set_cache_limit, _INITIAL_CACHE) if ON_CPU else (mx.set_memory_limit, device.device_memory())
    before = set_limit(limit)
    try:
        with nullcontext() if ON_CPU else wired_limit():
            yield
    finally:
        set_limit(before)


def limit_buffer_cache() -> None:
    """After the first step: on a CPU, let MLX keep as many bytes of freed buffers as a step needed besides its state.

    More would not be reused: attention in blocks needs a buffer of another size for each block. With a quarter of the
    memory as the limit, steps of 8,192 tokens that use 1.3 GB took 5.4 GB.
    """
    if ON_CPU:
        mx.set_cache_limit(mx.get_peak_memory() - mx.get_active_memory())
