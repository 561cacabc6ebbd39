"""Facts about this machine and what is installed."""

from __future__ import annotations

import platform as system
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlxlm.backend import device, platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.cpu_extension import load_extension
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import dispatch
from mlxlm.plan.machines import measure_matmul

_PACKAGES = (
    *("mlxlm", "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm"),
    *("numpy", "safetensors", "tokenizers", "transformers", "torch", "llguidance"),
)


def basic_facts() -> dict[str, Any]:
    """Device, MLX, BLAS and its measured speed, memory; numbers are in bytes and GFLOP/s."""
    blas = load_blas()
    return {
        "chip": platform.chip(),
        "cores": platform.cpu_cores(),
        "device": "CPU" if ON_CPU else f"GPU ({mx.device_info().get('device_name', 'unnamed')})",
        "python": sys.version.split()[0],
        "mlx": version("mlx"),
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "blas": f"{blas.name} ({blas.path})" if blas.path else blas.name,
        "matmul_gflops": round(measure_matmul(), 1),
        "memory": platform.total_memory(),
        "working_set": device.device_memory(),
        "compiler": platform.has_compiler() if ON_CPU else "not needed",
        "quantized_products": (load_extension().unavailable_reason or "compiled") if ON_CPU else "MLX's",
        "model_cache": str(platform.model_cache()),
    }


def report_facts() -> dict[str, Any]:
    """What a report of a problem needs, without paths and names of a person; memory is in bytes."""
    info = {} if ON_CPU else mx.device_info()
    facts = {
        "chip": platform.chip(),
        "cores": platform.cpu_cores(),
        "device": "CPU" if ON_CPU else f"GPU ({info.get('device_name', 'unnamed')})",
        "architecture": info.get("architecture"),
        "system": _system(),
        "memory_bytes": platform.total_memory(),
        "working_set_bytes": device.device_memory(),
        "largest_buffer_bytes": info.get("max_buffer_length"),
        "wired_limit": _wired_limit(),
        "thermal_state": platform.thermal_state() or "unknown",
        "on_battery": platform.on_battery(),
        "low_power_mode": platform.low_power_mode(),
        "python": sys.version.split()[0],
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "blas": load_blas().name,
        "compiler": platform.has_compiler() if ON_CPU else None,
        "kernel_mode": dispatch.mode(),
    }
    return {name: value for name, value in facts.items() if value is not None} | {"packages": _packages()}


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _system() -> str:
    """Name, version and architecture of the operating system."""
    if sys.platform == "darwin":
        return f"macOS {system.mac_ver()[0]}, {system.machine()}"
    with suppress(OSError):
        release = system.freedesktop_os_release()
        return f"{release['PRETTY_NAME']}, {system.system()} {system.release()}, {system.machine()}"
    return f"{system.system()} {system.release()}, {system.machine()}"


def _wired_limit() -> str | None:
    """The limit of wired GPU memory that was set by hand on a Mac (sysctl), in megabytes; None elsewhere."""
    if sys.platform != "darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    value = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return "unknown" if not value else "macOS's default" if value == "0" else f"{value} MB"
