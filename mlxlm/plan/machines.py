"""How fast machines multiply: what their makers publish, and what is measured here."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mlxlm.utils.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """flops: floating-point operations per second of matrix products in `dtype`, of one device. memory: bytes of one
    device, None where machines of this name differ or it doesn't say. kind: "cpu", "metal" or "cuda", which
    decides how training works. measured: here, else the maker's peak. source: who says so."""

    name: str
    flops: float
    dtype: str
    memory: int | None
    measured: bool
    source: str
    kind: str = "cuda"


def _peak(name: str, teraflops: float, gigabytes: int | None, source: str) -> Machine:
    """Of 16-bit operands where there are matrix units for them, on Apple's GPUs of 32."""
    metal = name.startswith("m")
    dtype, kind = ("float32", "metal") if metal else ("bfloat16", "cuda")
    return Machine(name, teraflops * 1e12, dtype, gigabytes and gigabytes * 10**9, False, source, kind)


# Peaks of matrix units with dense operands, unless the name says otherwise. Who repeats the maker's figure is named
# where the maker's own page was not read.
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
    """A machine by its name; "here" is this one, measured. Raises ConfigError otherwise."""
    if name == "here":
        return this_machine()
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r} in the table", "one of here, " + ", ".join(MACHINES))
    return MACHINES[name]


def custom_machine(flops: float, dtype: str = "bfloat16") -> Machine:
    """A device of which someone says what it delivers."""
    return Machine("custom", float(flops), dtype, None, False, "as given")


def this_machine(measure: bool = True) -> Machine:
    """This machine; with `measure`, what it delivers in large products of training's dtype, else 0."""
    from mlxlm.backend import device, platform
    from mlxlm.backend.mlx import ON_CPU
    from mlxlm.plan.training import THIS_DEVICE

    dtype = "float32" if ON_CPU else "bfloat16"
    source = f"{platform.chip()}, products of 1024 x 1024"
    found = Machine("here", 0.0, dtype, device.device_memory(), True, source, THIS_DEVICE)
    return replace(found, flops=measure_matmul(dtype=dtype) * 1e9) if measure else found


def measure_matmul(size: int = 1024, seconds: float = 0.3, dtype: str = "float32") -> float:
    """GFLOP/s of products of `size` x `size` matrices on the default device, the best of some.

    Others that work here at the same time make it slower: it goes on, up to ten times as long, until the best has
    come three times to within a tenth.
    """
    from mlxlm.backend.mlx import mx

    a = mx.random.normal((size, size)).astype(getattr(mx, dtype))
    mx.eval(a @ a)
    times, begun = [], time.perf_counter()
    while (spent := time.perf_counter() - begun) < 10 * seconds:
        if spent >= seconds and sum(t <= 1.1 * min(times) for t in times) >= 3:
            break
        start = time.perf_counter()
        mx.eval(a @ a)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9
