"""Facts about this machine. Importing this module does not import MLX."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from mlxlm.utils.errors import PlatformError

INSTALL_BACKEND = "pip install 'mlxlm[cpu]' (or cuda12, cuda13 for an NVIDIA GPU)"


def cpu_cores() -> int:
    """Cores this process may use (its affinity, not the machine's total)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiler() -> bool:
    """Whether `mx.compile` can build CPU code: MLX calls g++ for it."""
    try:
        return subprocess.run(["g++", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def total_memory() -> int:
    """Bytes of physical memory, or of the container's limit where that is lower."""
    import psutil

    total = psutil.virtual_memory().total
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def process_memory() -> int:
    """Resident bytes of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def chip() -> str:
    """The processor's name, e.g. "Apple M2 Max"."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        return out.stdout.strip() or "Apple silicon"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def on_battery() -> bool | None:
    """Whether this machine runs on its battery now; None where it has none, or none that can be seen."""
    if sys.platform == "linux":
        return _discharging(Path("/sys/class/power_supply"))
    import psutil

    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except OSError:  # a driver that is gone
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _discharging(supplies: Path) -> bool | None:
    """`on_battery` by Linux's power supplies. psutil takes them by their names, a wireless mouse for the machine's."""

    def says(supply: Path, name: str) -> str:
        try:
            return (supply / name).read_text().strip()
        except OSError:  # without that fact, or gone
            return ""

    found = [supply for supply in supplies.iterdir() if says(supply, "scope") != "Device"] if supplies.is_dir() else []
    states = {says(supply, "status") for supply in found if says(supply, "type") == "Battery"}
    if not states:
        return None
    if mains := {says(supply, "online") for supply in found if says(supply, "type") == "Mains"} & {"0", "1"}:
        return "1" not in mains
    return "Discharging" in states or (None if states <= {"Unknown", ""} else False)


def thermal_state() -> str | None:
    """ "hot" where the machine slows down or is about to, "cool" well below that, "warm" between; None: unknown.

    On macOS by the system's thermal pressure (`OSThermalNotification.h`): nominal is cool, moderate is warm, heavy and
    beyond are hot. On Linux by the sensors that have a critical temperature: hot from 5 degrees below it, cool from 15.
    """
    if sys.platform == "darwin":
        level = _thermal_pressure(ctypes.CDLL("/usr/lib/libSystem.dylib"))
        return None if level is None else ("cool", "warm", "hot")[min(level, 2)]
    import psutil

    try:
        found = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    except OSError:  # a driver that is gone
        return None
    # Sensors that aren't connected show 0, -128 or 255, and limits of 0 or 65261.
    distances = [
        s.critical - s.current for sensors in found.values() for s in sensors if _sane(s.critical) and _sane(s.current)
    ]
    if not distances:
        return None
    return "hot" if min(distances) <= 5 else "warm" if min(distances) < 15 else "cool"


def _sane(temperature: float | None) -> bool:
    return temperature is not None and 1 <= temperature <= 150


def _thermal_pressure(system: ctypes.CDLL) -> int | None:
    """The level that `notifyutil -g com.apple.system.thermalpressurelevel` shows, by notify(3); None on a failure."""
    token, level = ctypes.c_int(), ctypes.c_uint64()
    if system.notify_register_check(b"com.apple.system.thermalpressurelevel", ctypes.byref(token)):
        return None
    failed = system.notify_get_state(token, ctypes.byref(level))
    system.notify_cancel(token)
    return None if failed else level.value


def model_cache() -> Path:
    """The folder where downloaded models are kept: Hugging Face's cache."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"


def state_folder() -> Path:
    """Where mlxlm keeps its own small files (chat history), by the XDG rules. Not created here."""
    return _own_folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Where mlxlm keeps what it can find out again (kernel measurements), by the XDG rules. Not created here."""
    return _own_folder("XDG_CACHE_HOME", ".cache")


def _own_folder(variable: str, below_home: str) -> Path:
    """Raises PlatformError for a user without a home, as containers have."""
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "mlxlm"
    except RuntimeError:
        raise PlatformError("this user has no home folder", f"set HOME or {variable}") from None
