"""The speed of matrix products: published peaks, and measurements of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """A device that trains.

    Attributes:
        name: "here", "custom", or a name in `MACHINES`.
        flops: Floating-point operations per second of matrix products in `dtype`.
        dtype: Of these products.
        memory: Bytes. None if it isn't known.
        measured: Whether `flops` was measured here. Otherwise it is the manufacturer's peak.
        source: Where `flops` comes from.
        device_type: "cpu", "metal" or "cuda".
    """

    name: str
    flops: float
    dtype: str
    memory: int | None
    measured: bool
    source: str
    device_type: str = "cuda"


def _peak(name: str, teraflops: float, gigabytes: int | None, source: str) -> Machine:
    """Return a published peak: 16-bit products with matrix units, 32-bit products on Apple's GPUs."""
    metal = name.startswith("m")
    dtype, device_type = ("float32", "metal") if metal else ("bfloat16", "cuda")
    return Machine(name, teraflops * 1e12, dtype, gigabytes and gigabytes * 10**9, False, source, device_type)


# Peaks with dense operands, unless the name says otherwise. The source is a page that quotes the manufacturer if the
# manufacturer's own page was not read.
MACHINES = {
    machine.name: machine
    for machine in (
        _peak("a100", 312, 80, "NVIDIA's data sheet, at glennklockwood.com/garden/processors/A100"),
        _peak("a100-sparse", 624, 80, "the same, operands of 2:4 structured sparsity"),
        _peak("h100", 989.4, 80, "SXM5, glennklockwood.com/garden/processors/h100"),
        _peak("h200", 989, 141, "SXM, itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html"),
        _peak("m1", 2.6, None, "8 GPU cores, macrumors.com/2020/11/10/apple-announces-m1-chip-for-the-mac"),
        _peak("m1-pro", 5.2, None, "16 GPU cores, stuff.co.za/?p=135995"),
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
    from mlxlm.backend.mlx import ON_CPU
    from mlxlm.plan.training import THIS_DEVICE

    dtype = "float32" if ON_CPU else "bfloat16"
    source = f"{platform.chip()}, products of 1024 x 1024"
    machine = Machine("here", 0.0, dtype, device.device_memory(), True, source, THIS_DEVICE)
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
