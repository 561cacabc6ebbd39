"""How fast machines multiply: what their makers publish, and what is measured here."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from mlxlm.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """flops: floating-point operations per second of matrix products in `dtype`, of one device. memory: bytes of one
    device, None where machines of this name differ. measured: here, else the maker's peak. source: who says so."""

    name: str
    flops: float
    dtype: str
    memory: int | None
    measured: bool
    source: str


def _peak(name: str, teraflops: float, dtype: str, gigabytes: int | None, source: str) -> Machine:
    return Machine(name, teraflops * 1e12, dtype, gigabytes and gigabytes * 10**9, False, source)


# Peaks of matrix units with dense operands, unless the name says otherwise.
MACHINES = {
    machine.name: machine
    for machine in (
        _peak("v100", 125, "float16", 32, "NVIDIA's data sheet of the V100 SXM2 (2020)"),
        _peak("a100", 312, "bfloat16", 80, "NVIDIA's data sheet of the A100 80GB (2021)"),
        _peak("a100-sparse", 624, "bfloat16", 80, "the same, operands of 2:4 structured sparsity"),
        _peak("h100", 989.4, "bfloat16", 80, "NVIDIA's white paper on the H100 SXM5 (2022)"),
        _peak("h200", 989.4, "bfloat16", 141, "NVIDIA's data sheet of the H200 SXM (2024)"),
        _peak("m1", 2.6, "float32", None, "Apple's announcement of the M1 (10 November 2020), 8 GPU cores"),
        _peak("m1-pro", 5.2, "float32", None, "Apple's event of 18 October 2021, 16 GPU cores"),
        _peak("m1-max", 10.4, "float32", None, "Apple's event of 18 October 2021, 32 GPU cores"),
        _peak("m2", 3.6, "float32", None, "Apple's event of 6 June 2022, 10 GPU cores"),
    )
}


def find(name: str) -> Machine:
    """A machine by its name; "here" is this one, measured in a third of a second. Raises ConfigError otherwise."""
    if name == "here":
        return here()
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r} in the table", "one of here, " + ", ".join(MACHINES))
    return MACHINES[name]


def custom(flops: float, dtype: str = "bfloat16") -> Machine:
    """A device of which someone says what it delivers."""
    return Machine("custom", float(flops), dtype, None, False, "as given")


def here(measure: bool = True) -> Machine:
    """This machine; with `measure`, what it delivers in large products of training's dtype, else 0."""
    from mlxlm import platform
    from mlxlm._mlx import ON_CPU, mx

    memory = platform.total_memory()
    if not ON_CPU:
        memory = int(mx.device_info().get("max_recommended_working_set_size", 0.75 * memory))
    dtype = "float32" if ON_CPU else "bfloat16"
    found = Machine("here", 0.0, dtype, memory, True, f"{platform.chip()}, products of 1024 x 1024")
    return replace(found, flops=measure_matmul(dtype=dtype) * 1e9) if measure else found


def measure_matmul(size: int = 1024, seconds: float = 0.3, dtype: str = "float32") -> float:
    """GFLOP/s of products of `size` x `size` matrices on the default device, the best of some."""
    from mlxlm._mlx import mx

    a = mx.random.normal((size, size)).astype(getattr(mx, dtype))
    mx.eval(a @ a)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(a @ a)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9
