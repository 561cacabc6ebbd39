"""Resting on battery, in heat and by duty: with a machine and a clock that the test makes up."""

import ctypes
from types import SimpleNamespace

import psutil
import pytest

from mlxlm.backend import platform
from mlxlm.train import (
    CheckpointSaved,
    Finished,
    Paused,
    PowerPolicy,
    Resumed,
    Step,
    Stopped,
    Throttled,
    TrainingWarning,
)
from mlxlm.train.throttle import Throttle
from mlxlm.utils.errors import ConfigError
from tests.train.training_runs import contents, finish, read_log


class Machine:
    """`states` are (seconds, on battery, heat): what holds from then on. Sleeping moves its clock."""

    def __init__(self, *states):
        self.states, self.seconds, self.slept = states, 0.0, []

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        assert 0 < seconds <= 0.1  # a stop must be seen at once
        self.seconds += seconds
        self.slept.append(seconds)

    def rested(self, throttle):
        return sum(self.slept) - throttle.paused

    def state(self):
        return [s for s in self.states if s[0] <= self.seconds][-1]

    def throttle(self, **power):
        return Throttle(
            PowerPolicy(**power), on_battery=lambda: self.state()[1], thermal_state=lambda: self.state()[2],
            now=self.now, sleep=self.sleep,
        )  # fmt: skip

    def work(self, throttle, steps, seconds=1.0, should_stop=lambda: False):
        events = []
        for step in range(1, steps + 1):
            self.seconds += seconds
            events += throttle.between_steps(step, should_stop)
        return events


def test_pause_on_battery_until_it_is_plugged_in():
    machine = Machine((0, False, "cool"), (3.5, True, "cool"), (100, False, "cool"))
    throttle = machine.throttle(on_battery="pause")
    events = machine.work(throttle, 30)
    paused, resumed = events
    # It looks every 10 seconds: after steps 1 and 11.
    assert paused == Paused(11, "the machine runs on battery")
    assert isinstance(resumed, Resumed) and (resumed.step, resumed.reason) == (11, paused.reason)
    assert 89 <= resumed.seconds <= 100.1 and throttle.paused == resumed.seconds
    assert machine.rested(throttle) == pytest.approx(0, abs=1e-6)


def test_ignored_is_not_asked():
    machine = Machine((0, True, "hot"))
    assert machine.work(machine.throttle(), 5) == [] and machine.slept == []
    assert machine.work(machine.throttle(on_heat="ignore", on_battery="ignore"), 5) == []


def test_heat_pauses_until_it_is_cool_again():
    machine = Machine((0, None, "hot"), (40, None, "warm"), (80, None, "cool"), (100, None, "warm"))
    events = machine.work(machine.throttle(on_heat="pause"), 60)
    assert [type(e) for e in events] == [Paused, Resumed] and events[0].reason == "the machine is hot"
    assert 79 <= events[1].seconds <= 91  # warm is not cool enough to begin again, and not hot enough to stop


def test_slow_works_half_of_the_time():
    machine = Machine((0, True, "cool"), (50, False, "cool"))
    throttle = machine.throttle(on_battery="slow", duty_cycle=80)
    events = machine.work(throttle, 60)
    assert [type(e) for e in events] == [Throttled, Resumed]
    assert events[0] == Throttled(1, "the machine runs on battery", 50)
    slow_steps = events[1].step - events[0].step
    # Then 60 - slow_steps steps at 80%: a rest of a quarter of a second for each.
    assert machine.rested(throttle) == pytest.approx(slow_steps + (60 - slow_steps) / 4, abs=1e-6)
    assert 50 <= events[1].seconds <= 62 and throttle.paused == 0


def test_slow_is_no_faster_than_the_duty():
    machine = Machine((0, True, "cool"))
    throttle = machine.throttle(on_battery="slow", duty_cycle=20)
    assert machine.work(throttle, 1)[0].duty_cycle == 20 and machine.rested(throttle) == pytest.approx(4)


@pytest.mark.parametrize("duty_cycle", [70, 100, 1, 33.3])
def test_duty_is_the_share_of_the_time_that_is_worked(duty_cycle):
    machine = Machine((0, None, None))
    throttle = machine.throttle(duty_cycle=duty_cycle)
    assert machine.work(throttle, 20, seconds=0.3) == []
    assert 20 * 0.3 / machine.seconds == pytest.approx(duty_cycle / 100)
    assert machine.rested(throttle) == pytest.approx(machine.seconds - 6)


def test_a_pause_and_a_rest_end_when_a_stop_is_asked_for():
    machine = Machine((0, True, "cool"))
    events = machine.work(machine.throttle(on_battery="pause"), 1, should_stop=lambda: machine.seconds > 5)
    assert events == [Paused(1, "the machine runs on battery")] and machine.seconds < 5.2
    machine = Machine((0, None, None))
    machine.work(machine.throttle(duty_cycle=1), 1, should_stop=lambda: machine.seconds > 5)
    assert machine.seconds < 5.2


def test_a_rest_is_not_owed_for_a_pause():
    machine = Machine((0, True, "cool"), (1000, False, "cool"))
    throttle = machine.throttle(on_battery="pause", duty_cycle=50)
    machine.work(throttle, 2)
    assert machine.rested(throttle) == pytest.approx(2, abs=1e-6)


def test_what_this_machine_cannot_know_is_said():
    machine = Machine((0, None, None))
    throttle = machine.throttle(on_battery="pause", on_heat="slow")
    battery, thermal_state = throttle.unsupported()
    assert "no battery" in battery and "no temperatures" in thermal_state
    assert machine.throttle().unsupported() == [] and machine.work(throttle, 20) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_battery": "stop"},
        {"on_heat": ""},
        {"duty_cycle": 0},
        {"duty_cycle": 101},
        {"duty_cycle": True},
        {"duty_cycle": "70"},
    ],
)
def test_impossible_powers(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PowerPolicy(**wrong)


def on_this_machine(monkeypatch, machine):
    monkeypatch.setattr("mlxlm.train.throttle.Throttle", lambda power, **_: machine.throttle(**vars(power)))


def test_rests_change_no_weights_and_no_figures(new_run, monkeypatch):
    """A run that is paused, slowed and rested equals one that is not, to the bit; pauses aren't training time."""
    plain, rested = new_run("plain", steps=12), new_run("rested", steps=12)
    finish(plain)
    machine = Machine((0, True, "cool"), (50, False, "hot"), (110, False, "cool"))
    on_this_machine(monkeypatch, machine)
    events = finish(rested, power=PowerPolicy(on_battery="pause", on_heat="slow", duty_cycle=70))
    assert [type(e) for e in events if isinstance(e, Paused | Resumed | Throttled)][:3] == [Paused, Resumed, Throttled]
    assert isinstance(events[-1], Finished) and machine.seconds > 40 > events[-1].seconds
    assert contents(plain.path / "checkpoints/step-12") == contents(rested.path / "checkpoints/step-12")
    steps = [e for e in events if isinstance(e, Step)]
    assert all(s.seconds_left < 40 for s in steps[2:]) and steps[-1].seconds == events[-1].seconds
    logged = [e["event"] for e in read_log(rested) if e["event"] in ("paused", "resumed", "throttled")]
    assert logged[:3] == ["paused", "resumed", "throttled"]


def test_a_pause_saves_first_and_a_stop_in_it_needs_no_step(new_run, monkeypatch):
    run = new_run("run", steps=20)
    machine = Machine((0, False, "cool"), (0.5, True, "cool"))
    on_this_machine(monkeypatch, machine)
    events = []

    def should_stop():
        machine.seconds += 0.001  # the steps take no time of this clock
        return any(isinstance(e, Paused) for e in events) and machine.seconds > 100

    from mlxlm.tokenizer import load
    from mlxlm.train import train

    for event in train(run, load(run.path), should_stop=should_stop, power=PowerPolicy(on_battery="pause")):
        events.append(event)
        machine.seconds += isinstance(event, Step) * 4.0
    kinds = [type(e) for e in events if not isinstance(e, Step)]
    assert kinds[-3:] == [CheckpointSaved, Paused, Stopped]
    paused = events[-2].step
    assert events[-1] == Stopped(paused, run.path) and run.checkpoints()[-1].name == f"step-{paused}"
    monkeypatch.undo()
    whole = new_run("whole", steps=20)
    finish(whole), finish(run, resume=True)
    assert contents(whole.path / "checkpoints/step-20") == contents(run.path / "checkpoints/step-20")


def test_a_run_that_starts_on_battery_waits_and_says_what_it_cannot_know(new_run, monkeypatch):
    run = new_run("run", steps=2)
    machine = Machine((0, True, None), (30, False, None))
    on_this_machine(monkeypatch, machine)
    events = finish(run, power=PowerPolicy(on_battery="pause", on_heat="pause"))
    assert [type(e) for e in events[:4]][1:] == [TrainingWarning, Paused, Resumed]
    assert "temperatures" in events[1].message and events[2].step == 0


@pytest.mark.parametrize(
    ("battery", "expected"),
    [(None, None), ((50, 100, False), True), ((50, 100, True), False), ((50, 100, None), None)],
)
def test_the_battery_of_psutil(monkeypatch, battery, expected):
    found = battery and SimpleNamespace(percent=battery[0], secsleft=battery[1], power_plugged=battery[2])
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    assert platform.on_battery() is expected


MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], None),
        ([MOUSE], None),
        ([MOUSE, {"type": "Battery", "status": "Charging"}], False),
        ([MOUSE, {"type": "Battery", "scope": "System", "status": "Discharging"}], True),
        ([{"type": "Battery", "status": "Not charging"}, {"type": "Battery", "status": "Discharging"}], True),
        ([{"type": "Mains", "online": "1"}, {"type": "Battery", "status": "Discharging"}], False),
        ([{"type": "Mains", "online": "0"}, {"type": "Battery", "status": "Unknown"}], True),
        ([{"type": "Mains", "online": "1"}], None),
        ([{"type": "Battery", "status": "Unknown"}], None),
        ([{"type": "Battery"}], None),
    ],
)
def test_the_power_supplies_of_linux(tmp_path, supplies, expected):
    for i, facts in enumerate(supplies):
        (tmp_path / f"hidpp_battery_{i}").mkdir()
        for name, value in facts.items():
            (tmp_path / f"hidpp_battery_{i}" / name).write_text(f"{value}\n")
    assert platform._linux_on_battery(tmp_path) is expected
    assert platform._linux_on_battery(tmp_path / "none") is None


def test_a_battery_whose_driver_is_gone(monkeypatch):
    def gone():
        raise FileNotFoundError("/sys/class/power_supply/BAT0")

    monkeypatch.setattr(psutil, "sensors_battery", gone, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", gone, raising=False)
    monkeypatch.setattr(platform.sys, "platform", "linux")
    assert platform.thermal_state() is None
    monkeypatch.setattr(platform.sys, "platform", "win32")
    assert platform.on_battery() is None


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
def test_the_temperatures_of_psutil(monkeypatch, sensors, expected):
    found = {"chip": [SimpleNamespace(label="", current=c, high=h, critical=k) for c, h, k in sensors]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    monkeypatch.setattr(platform.sys, "platform", "linux")
    assert platform.thermal_state() == expected


@pytest.mark.parametrize(("level", "expected"), [(0, "cool"), (1, "warm"), (2, "hot"), (4, "hot"), (None, None)])
def test_the_thermal_pressure_of_macos(monkeypatch, level, expected):
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
