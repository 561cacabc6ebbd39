"""Machines: published speeds of matrix products and of memory, and measurements of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """A device that trains, or runs a model.

    Attributes:
        name: "here", "custom", or a name in `MACHINES`.
        flops: Floating-point operations per second of matrix products in `dtype`.
        dtype: Of these products.
        memory: Bytes. None if it isn't known.
        measured: Whether `flops` was measured here. Otherwise it is a published peak.
        source: Where `flops` comes from.
        device_type: "cpu", "metal" or "cuda".
        bandwidth: Memory bandwidth in bytes per second: measured here, or the manufacturer's figure. None if it isn't
            known.
        memory_options: Gigabytes of memory that the manufacturer sells it with, if there are several.
    """

    name: str
    flops: float
    dtype: str
    memory: int | None
    measured: bool
    source: str
    device_type: str = "cuda"
    bandwidth: float | None = None
    memory_options: tuple[int, ...] = ()


def _nvidia(name: str, teraflops: float, gigabytes: int, source: str) -> Machine:
    """Return a published peak of 16-bit products with matrix units."""
    return Machine(name, teraflops * 1e12, "bfloat16", gigabytes * 10**9, False, source)


_APPLE, _HUGGING_FACE = "Apple", "Hugging Face's list of hardware, huggingface/huggingface.js"


def _apple(
    name: str, cores: int, gigabytes_per_second: float, memory: tuple[int, ...], teraflops: float, source: str
) -> Machine:
    """Return the published peak of 32-bit products of a chip's largest GPU."""
    source = f"{cores} GPU cores; {source}"
    return Machine(name, teraflops * 1e12, "float32", None, False, source, "metal", gigabytes_per_second * 1e9, memory)


# Peaks with dense operands, unless the name says otherwise. The source is a page that quotes the manufacturer if the
# manufacturer's own page was not read.
#
# Of Apple's chips GPU cores, memory bandwidth and memory options are from Apple's technical specifications and press
# releases, for the chip's largest GPU; a Max with fewer cores has 300 (M3), 410 (M4) or 460 GB/s (M5). Apple published
# FLOP/s up to the M2; those of later chips are Hugging Face's. There is no M4 Ultra, and no M5 Ultra yet.
MACHINES = {
    machine.name: machine
    for machine in (
        _nvidia("a100", 312, 80, "NVIDIA's data sheet, at glennklockwood.com/garden/processors/A100"),
        _nvidia("a100-sparse", 624, 80, "the same, operands of 2:4 structured sparsity"),
        _nvidia("h100", 989.4, 80, "SXM5, glennklockwood.com/garden/processors/h100"),
        _nvidia("h200", 989, 141, "SXM, itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html"),
        _apple("m1", 8, 68.25, (8, 16), 2.6, _APPLE),
        _apple("m1-pro", 16, 200, (16, 32), 5.2, _APPLE),
        _apple("m1-max", 32, 400, (32, 64), 10.4, _APPLE),
        _apple("m1-ultra", 64, 800, (64, 128), 21, _APPLE),
        _apple("m2", 10, 100, (8, 16, 24), 3.6, _APPLE),
        _apple("m2-pro", 19, 200, (16, 32), 6.8, _HUGGING_FACE),
        _apple("m2-max", 38, 400, (32, 64, 96), 13.49, _HUGGING_FACE),
        _apple("m2-ultra", 76, 800, (64, 128, 192), 27.2, _HUGGING_FACE),
        _apple("m3", 10, 100, (8, 16, 24), 4.1, _HUGGING_FACE),
        _apple("m3-pro", 18, 150, (18, 36), 7.4, _HUGGING_FACE),
        _apple("m3-max", 40, 400, (48, 64, 128), 14.2, _HUGGING_FACE),
        _apple("m3-ultra", 80, 819, (96, 256, 512), 28.4, _HUGGING_FACE),
        _apple("m4", 10, 120, (16, 24, 32), 4.6, _HUGGING_FACE),
        _apple("m4-pro", 20, 273, (24, 48, 64), 9.2, _HUGGING_FACE),
        _apple("m4-max", 40, 546, (48, 64, 128), 18.4, _HUGGING_FACE),
        _apple("m5", 10, 153, (16, 24, 32), 5.7, _HUGGING_FACE),
        _apple("m5-pro", 20, 307, (24, 48, 64), 11.4, _HUGGING_FACE),
        _apple("m5-max", 40, 614, (48, 64, 128), 22.8, _HUGGING_FACE),
    )
}


def find_machine(name: str) -> Machine:
    """Return the machine of this name. "here" is this machine, measured.

    Raises:
        ConfigError: There is no such machine.
    """
    if name == "here":
        return this_machine()
    if name not in MACHINES:
        raise ConfigError(f"unknown machine {name!r}", "one of here, " + ", ".join(MACHINES))
    return MACHINES[name]


def custom_machine(flops: float, dtype: str = "bfloat16") -> Machine:
    """Return a machine of a given speed."""
    return Machine("custom", float(flops), dtype, None, False, "as given")


def this_machine(measure: bool = True) -> Machine:
    """Return this machine, with its measured speed in the dtype of training, or 0 without `measure`."""
    from mlxlm.backend import device, platform
    from mlxlm.backend.bandwidth import cached_bandwidth
    from mlxlm.backend.mlx import ON_CPU
    from mlxlm.plan.training import THIS_DEVICE

    dtype = "float32" if ON_CPU else "bfloat16"
    source = f"{platform.chip()}, products of 1024 x 1024"
    machine = Machine("here", 0.0, dtype, device.device_memory(), True, source, THIS_DEVICE, cached_bandwidth())
    return replace(machine, flops=measure_matmul(dtype=dtype) * 1e9) if measure else machine


def measure_matmul(size: int = 1024, seconds: float = 0.3, dtype: str = "float32") -> float:
    """Measure the GFLOP/s of products of `size` x `size` matrices on the default device: the best of several.

    Other processes make a measurement slower, so it is repeated, for up to ten times `seconds`, until three times are
    within 10 % of the best.
    """
    from mlxlm.backend.mlx import mx

    a = mx.random.normal((size, size)).astype(getattr(mx, dtype))
    mx.eval(a @ a)
    times: list[float] = []
    start_time = time.perf_counter()
    while (spent := time.perf_counter() - start_time) < 10 * seconds:
        if spent >= seconds and sum(t <= 1.1 * min(times) for t in times) >= 3:
            break
        start = time.perf_counter()
        mx.eval(a @ a)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9
