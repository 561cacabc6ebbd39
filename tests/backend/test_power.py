"""Battery and temperature of this machine."""

import ctypes
from types import SimpleNamespace

import psutil
import pytest

from mlxlm.backend import platform


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
