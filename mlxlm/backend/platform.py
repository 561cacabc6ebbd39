"""Facts about this machine, and what keeps a Mac awake. Importing this module does not import MLX."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxlm.utils.errors import PlatformError

_M_MMAP_THRESHOLD = -3  # of glibc's <malloc.h>
INSTALL_BACKEND = "pip install 'mlxlm[cpu]' (or cuda12, cuda13 for an NVIDIA GPU)"
ALLOW_DOWNLOADS = "downloads allowed (no --offline, MLXLM_OFFLINE or HF_HUB_OFFLINE)"


def cpu_cores() -> int:
    """Number of CPU cores that this process may use: its affinity, not the machine's total."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_compiler() -> bool:
    """Whether there is g++, which MLX needs for `mx.compile` on a CPU."""
    try:
        return subprocess.run(["g++", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def total_memory() -> int:
    """Bytes of physical memory, or the container's limit if that is lower."""
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
    """Bytes of resident memory of this process."""
    import psutil

    return psutil.Process().memory_info().rss


def map_large_buffers() -> None:
    """Have glibc return memory to the system as soon as a buffer of 1 MB or more is freed.

    By default it places buffers of up to 32 MB on the heap once one has been freed, where buffers of ever new sizes, as
    caches that grow, leave gaps: a server's resident memory was 1.2 GB above what its arrays took, and then 0.2 GB.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, 1 << 20)


def trim_heap() -> None:
    """Have glibc return the gaps to the system that small buffers have left on its heap."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None  # musl has none of these
    if function is not None:
        function(*arguments)


def chip() -> str:
    """Name of the processor, such as "Apple M2 Max"."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "Apple silicon"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def on_battery() -> bool | None:
    """Whether this machine runs on battery; None if it has no battery or doesn't tell."""
    import psutil

    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except OSError:  # the driver was removed
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def low_power_mode() -> bool | None:
    """Whether a Mac is in Low Power Mode, which slows it down; None if it doesn't tell, and on other systems.

    Macs that also have a High Power Mode print `powermode`, others `lowpowermode`; 1 is low.
    """
    if sys.platform != "darwin":
        return None
    settings = subprocess.run(["/usr/bin/pmset", "-g"], capture_output=True, text=True, check=False).stdout
    mode = re.search(r"^\s*(?:low)?powermode\s+(\d)", settings, re.MULTILINE)
    return None if mode is None else mode[1] == "1"


def thermal_state() -> str | None:
    """How hot this machine is: "cool", "warm", "hot" (it is slowed down or soon will be) or None if unknown.

    On macOS by the thermal pressure (`OSThermalNotification.h`): nominal is cool, moderate is warm, others are hot. On
    Linux by the sensors with a critical temperature: hot within 5 degrees of it, cool from 15 degrees below it.
    """
    if sys.platform == "darwin":
        level = _thermal_pressure(ctypes.CDLL("/usr/lib/libSystem.dylib"))
        return None if level is None else ("cool", "warm", "hot")[min(level, 2)]
    import psutil

    try:
        sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    except OSError:  # the driver was removed
        return None
    temperatures = [(sensor.current, sensor.critical or 0) for group in sensors.values() for sensor in group]
    # Sensors that aren't connected show 0, -128 or 255, and limits of 0 or 65261.
    margins = [limit - now for now, limit in temperatures if 1 <= now <= 150 and 1 <= limit <= 150]
    if not margins:
        return None
    return "hot" if min(margins) <= 5 else "warm" if min(margins) < 15 else "cool"


def _thermal_pressure(system: ctypes.CDLL) -> int | None:
    """The level of `notifyutil -g com.apple.system.thermalpressurelevel`, by notify(3); None if that fails."""
    token, level = ctypes.c_int(), ctypes.c_uint64()
    if system.notify_register_check(b"com.apple.system.thermalpressurelevel", ctypes.byref(token)):
        return None
    failed = system.notify_get_state(token, ctypes.byref(level))
    system.notify_cancel(token)
    return None if failed else level.value


def model_cache() -> Path:
    """Hugging Face's cache, where models of the hub are downloaded to."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or caches / "huggingface") / "hub"


def cached_repository(id: str) -> Path:
    """Folder of a model of the hub in `model_cache`. It may not exist."""
    return model_cache() / "--".join(["models", *id.split("/")])


def download_folder() -> Path:
    """Folder of models that mlxlm downloaded itself: MLXLM_MODELS, or `models` in `cache_folder`. It may not exist."""
    return Path(os.environ["MLXLM_MODELS"]) if os.environ.get("MLXLM_MODELS") else cache_folder() / "models"


def is_offline() -> bool:
    """Whether nothing may be downloaded, by MLXLM_OFFLINE or HF_HUB_OFFLINE."""
    values = (os.environ.get(name, "") for name in ("MLXLM_OFFLINE", "HF_HUB_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def state_folder() -> Path:
    """Folder for mlxlm's own small files (chat history), by the XDG rules. It may not exist."""
    return _xdg_folder("XDG_STATE_HOME", ".local/state")


def config_folder() -> Path:
    """Folder for files that the user writes (system prompts), by the XDG rules. It may not exist."""
    return _xdg_folder("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Folder for measurements that can be repeated, by the XDG rules. It may not exist."""
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def _xdg_folder(variable: str, below_home: str) -> Path:
    """Raises PlatformError for a user without a home folder, as in containers."""
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "mlxlm"
    except RuntimeError:
        raise PlatformError("this user has no home folder", f"set HOME or {variable}") from None


@contextmanager
def prevent_sleep() -> Iterator[None]:
    """Keep a Mac from falling asleep inside the block; its display may turn off. A closed lid still ends in sleep.

    caffeinate(8) waits for this process, so that it never outlives it: -i is for idle sleep, -s for all sleep on AC.
    """
    if sys.platform != "darwin":
        yield
        return
    command = ["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]
    # In a process group of its own, a Ctrl-C that asks for the last checkpoint doesn't end it.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as process:
        try:
            yield
        finally:
            process.terminate()


def seconds_asleep() -> float:
    """Seconds that this machine has slept so far, from any start.

    The clock that goes on while it sleeps, minus the one that stands still. Setting the time changes neither.
    """
    with_sleep = time.CLOCK_MONOTONIC_RAW if sys.platform == "darwin" else time.CLOCK_BOOTTIME
    return time.clock_gettime(with_sleep) - time.monotonic()
