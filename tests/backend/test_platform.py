"""This machine: the import of MLX, its memory and cores, power and heat, and sleep."""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlxlm.backend import device, platform
from mlxlm.backend.blas import Blas
from mlxlm.backend.device import num_batch_shards
from mlxlm.backend.mlx import ON_CPU
from mlxlm.backend.platform import prevent_sleep, seconds_asleep

LINUX = pytest.mark.skipif(sys.platform == "darwin", reason="MLX uses Accelerate on macOS")


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_mlx_the_error_tells_what_to_install():
    code = "import sys; sys.modules['mlx.core'] = None\nimport mlxlm.backend.mlx"
    done = python(code)
    assert "MLX has no backend here" in done.stderr and "mlxlm[cpu]" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc leaves gaps")
def test_trimming_the_heap_returns_gaps_between_small_buffers():
    code = (
        "from mlxlm.backend import platform\n"
        "buffers = [bytes(b'x' * 50_000) for _ in range(2000)]\n"
        "del buffers[::2]\n"
        "before = platform.process_memory()\n"
        "platform.trim_heap()\n"
        "print(before - platform.process_memory())"
    )
    assert int(python(code).stdout) > 30e6


def test_only_one_module_imports_mlx():
    """It sets the BLAS and the allocator, which no other import may bypass."""
    package = Path(platform.__file__).parents[1]
    importing = re.compile(r"^\s*(import|from) mlx\b", re.MULTILINE)
    assert [p.name for p in package.rglob("*.py") if importing.search(p.read_text())] == ["mlx.py"]


def test_device_memory(monkeypatch):
    def memory(**info):
        monkeypatch.setattr(device.mx, "device_info", lambda: {"device_name": "a GPU", **info})
        return device.device_memory()

    monkeypatch.setattr(device, "ON_CPU", True)
    assert memory() == platform.total_memory()
    monkeypatch.setattr(device, "ON_CPU", False)
    assert memory(memory_size=16 << 30, max_recommended_working_set_size=12 << 30) == 12 << 30  # Metal
    assert memory(total_memory=24 << 30, free_memory=20 << 30) == 24 << 30  # CUDA
    monkeypatch.setattr(device, "_num_processes", 2)
    assert memory(total_memory=24 << 30) == 24 << 30
    assert memory(max_recommended_working_set_size=12 << 30) == 6 << 30
    monkeypatch.setattr(device, "_num_processes", 1)
    assert memory() is None


@LINUX
@pytest.mark.skipif(not ON_CPU, reason="a GPU needs no BLAS")
def test_the_warning_about_a_slow_blas_is_printed():
    code = "from mlxlm.backend import blas\nblas._loaded = blas.Blas('reference', None)\nimport mlxlm.backend.mlx"
    done = python(code)
    assert "Warning: no fast BLAS found" in done.stderr and "pip install mkl" in done.stderr
    late = python("import mlx.core\nimport mlxlm.backend.mlx")
    assert "mlx was imported before mlxlm" in late.stderr


@LINUX
@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers have an allocator of their own")
def test_memory_of_large_buffers_goes_back_to_the_system():
    code = """
import ctypes
import mlxlm.backend.mlx
libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    raise SystemExit("77")
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(16 << 20))  # by default, smaller buffers are placed on the heap after this
before = libc.mallinfo2().hblks
libc.malloc(2 << 20)
print(libc.mallinfo2().hblks - before)
"""
    done = python(code)
    if "77" in done.stderr:
        pytest.skip("needs glibc 2.33")
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    ("there", "batch_size", "parts"),
    [(2, 1, 1), (2, 2, 2), (2, 3, 1), (2, 5, 2), (2, 8, 2), (1, 8, 1), (4, 8, 4), (6, 8, 1), (6, 32, 6), (16, 8, 1)],
)
def test_num_batch_shards(monkeypatch, there, batch_size, parts):
    monkeypatch.setattr(platform, "cpu_cores", lambda: there)
    monkeypatch.setattr(device, "ON_CPU", True)
    assert num_batch_shards(batch_size) == parts


def test_one_shard_without_blas_threads_or_on_a_gpu(monkeypatch):
    monkeypatch.setattr(platform, "cpu_cores", lambda: 2)
    monkeypatch.setattr(device, "load_blas", lambda: Blas("BLIS", "libblis.so"))
    assert num_batch_shards(8) == 1
    monkeypatch.undo()
    monkeypatch.setattr(device, "ON_CPU", False)
    assert num_batch_shards(8) == 1


@pytest.mark.parametrize(
    ("battery", "expected"),
    [(None, None), ((50, 100, False), True), ((50, 100, True), False), ((50, 100, None), None)],
)
def test_battery_by_psutil(monkeypatch, battery, expected):
    found = battery and SimpleNamespace(percent=battery[0], secsleft=battery[1], power_plugged=battery[2])
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    assert platform.on_battery() is expected


def test_sensor_errors(monkeypatch):
    def gone():
        raise FileNotFoundError("/sys/class/power_supply/BAT0")

    monkeypatch.setattr(psutil, "sensors_battery", gone, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", gone, raising=False)
    monkeypatch.setattr(platform.sys, "platform", "linux")
    assert platform.thermal_state() is None and platform.on_battery() is None


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ([], None),
        ([(50, 80, None)], None),  # no critical temperature
        ([(50, 80, 100), (40, 70, 95)], "cool"),
        ([(50, 80, 100), (81, 70, 95)], "warm"),
        ([(50, 80, 100), (90, 70, 95)], "hot"),
        ([(50, 80, 100), (0, 0, 0), (255, 65261.8, 65261.8), (-128, 0, 100)], "cool"),  # not connected
    ],
)
def test_temperatures_by_psutil(monkeypatch, sensors, expected):
    found = {"chip": [SimpleNamespace(label="", current=c, high=h, critical=k) for c, h, k in sensors]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    monkeypatch.setattr(platform.sys, "platform", "linux")
    assert platform.thermal_state() == expected


@pytest.mark.parametrize(("level", "expected"), [(0, "cool"), (1, "warm"), (2, "hot"), (4, "hot"), (None, None)])
def test_thermal_pressure_of_macos(monkeypatch, level, expected):
    """notify(3) writes through pointers and returns 0 where it succeeds; its tokens are given back."""
    given_back = []

    def register(name, token):
        assert name == b"com.apple.system.thermalpressurelevel"
        ctypes.cast(token, ctypes.POINTER(ctypes.c_int))[0] = 7
        return 0

    def state(token, value):
        assert token.value == 7
        ctypes.cast(value, ctypes.POINTER(ctypes.c_uint64))[0] = level or 0
        return 1 if level is None else 0

    system = SimpleNamespace(
        notify_register_check=register, notify_get_state=state, notify_cancel=lambda token: given_back.append(token)
    )
    monkeypatch.setattr(platform.sys, "platform", "darwin")
    monkeypatch.setattr(platform.ctypes, "CDLL", lambda path: system)
    assert platform.thermal_state() == expected and len(given_back) == 1


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (" standby              1\n lowpowermode         1\n", True),
        (" lowpowermode         0\n highpowermode        1\n", False),
        (" powermode            1\n", True),
        (" powermode            2\n", False),
        (" highpowermode        1\n", None),
        ("", None),
    ],
)
def test_low_power_mode_by_pmset(monkeypatch, printed, expected):
    def run(command, **_):
        assert command == ["/usr/bin/pmset", "-g"]
        return SimpleNamespace(stdout=printed)

    monkeypatch.setattr(platform.subprocess, "run", run)
    assert platform.low_power_mode() is None
    monkeypatch.setattr(platform.sys, "platform", "darwin")
    assert platform.low_power_mode() is expected


@pytest.fixture
def caffeinate(monkeypatch):
    """A stand-in for caffeinate: the list of its processes."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            assert command == ["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]
            super().__init__(["sleep", "600"], **options)
            processes.append(self)

    monkeypatch.setattr(platform.subprocess, "Popen", Popen)
    monkeypatch.setattr(platform.sys, "platform", "darwin")
    return processes


def test_caffeinate_runs_inside_the_block(caffeinate):
    with prevent_sleep():
        (process,) = caffeinate
        assert process.poll() is None
        assert os.getpgid(process.pid) != os.getpgrp()  # a Ctrl-C in the terminal doesn't reach it
    assert process.returncode is not None


def test_caffeinate_ends_with_an_error(caffeinate):
    with pytest.raises(KeyboardInterrupt), prevent_sleep():
        raise KeyboardInterrupt
    assert caffeinate[0].returncode is not None


def test_other_systems_start_nothing(caffeinate, monkeypatch):
    monkeypatch.setattr(platform.sys, "platform", "linux")
    with prevent_sleep():
        assert caffeinate == []


@pytest.mark.parametrize(("system", "clock"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC_RAW")])
def test_seconds_asleep(monkeypatch, system, clock):
    """The clock that goes on in sleep, minus `monotonic`, which doesn't; the time of day may be set meanwhile."""
    now = {"awake": 100.0, "asleep": 0.0}

    def clock_gettime(number):
        assert number == getattr(time, clock)
        return now["awake"] + now["asleep"] + 7

    monkeypatch.setattr(platform.sys, "platform", system)
    monkeypatch.setattr(platform.time, "clock_gettime", clock_gettime)
    monkeypatch.setattr(platform.time, "monotonic", lambda: now["awake"])
    before = seconds_asleep()
    now["awake"] += 50
    assert seconds_asleep() == before
    now["asleep"] += 3600
    assert seconds_asleep() == before + 3600


def test_this_machine_has_these_clocks():
    assert abs(seconds_asleep() - seconds_asleep()) < 1
