"""Rests and pauses on battery, when hot and by duty cycle, on a simulated machine."""

import pytest

from mlxlm.tokenizer import load
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
    train,
)
from mlxlm.train.throttle import Throttle
from mlxlm.utils.errors import ConfigError
from tests.train.training_runs import contents, finish, read_log


class Machine:
    """A clock, a battery and a thermal state. `states` are (start time, on battery, thermal state)."""

    def __init__(self, states):
        self.states, self.seconds, self.slept = states, 0.0, 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        assert 0 < seconds <= 0.1  # a stop must be seen at once
        self.seconds += seconds
        self.slept += seconds

    def on_battery(self):
        return [s for s in self.states if s[0] <= self.seconds][-1][1]

    def thermal_state(self):
        return [s for s in self.states if s[0] <= self.seconds][-1][2]

    def throttle(self, **power):
        return Throttle(PowerPolicy(**power))

    def work(self, throttle, steps, seconds=1.0, should_stop=lambda: False):
        events = []
        for step in range(1, steps + 1):
            self.seconds += seconds
            events += throttle.between_steps(step, should_stop)
        return events

    def rested(self, throttle):
        return pytest.approx(self.slept - throttle.paused, abs=1e-6)


@pytest.fixture
def make_machine(monkeypatch):
    def make(*states):
        machine = Machine(states)
        monkeypatch.setattr("mlxlm.train.throttle.time", machine)
        monkeypatch.setattr("mlxlm.train.throttle.platform", machine)
        return machine

    return make


def test_pause_on_battery(make_machine):
    """The battery is read every 10 seconds: after steps 1 and 11."""
    machine = make_machine((0, False, "cool"), (3.5, True, "cool"), (100, False, "cool"))
    throttle = machine.throttle(on_battery="pause")
    paused, resumed = machine.work(throttle, 30)
    assert paused == Paused(11, "the machine runs on battery")
    assert isinstance(resumed, Resumed) and (resumed.step, resumed.reason) == (11, paused.reason)
    assert 89 <= resumed.seconds <= 100.1 and throttle.paused == resumed.seconds
    assert machine.rested(throttle) == 0


def test_ignore(make_machine):
    machine = make_machine((0, True, "hot"))
    assert machine.work(machine.throttle(), 5) == [] and machine.slept == 0


def test_pause_when_hot(make_machine):
    """A warm machine neither pauses nor resumes."""
    machine = make_machine((0, None, "hot"), (40, None, "warm"), (80, None, "cool"), (100, None, "warm"))
    events = machine.work(machine.throttle(on_heat="pause"), 60)
    assert [type(e) for e in events] == [Paused, Resumed] and events[0].reason == "the machine is hot"
    assert 79 <= events[1].seconds <= 91


def test_slow_is_a_duty_cycle_of_a_half(make_machine):
    machine = make_machine((0, True, "cool"), (50, False, "cool"))
    throttle = machine.throttle(on_battery="slow", duty_cycle=80)
    throttled, resumed = machine.work(throttle, 60)
    assert throttled == Throttled(1, "the machine runs on battery", 50) and isinstance(resumed, Resumed)
    slow_steps = resumed.step - throttled.step
    assert machine.rested(throttle) == slow_steps + (60 - slow_steps) / 4  # a rest of 0.25 seconds at 80%
    assert 50 <= resumed.seconds <= 62 and throttle.paused == 0
    machine = make_machine((0, True, "cool"))
    slower = machine.throttle(on_battery="slow", duty_cycle=20)
    assert machine.work(slower, 1)[0].duty_cycle == 20 and machine.rested(slower) == 4


@pytest.mark.parametrize("duty_cycle", [70, 100, 1])
def test_duty_cycle(make_machine, duty_cycle):
    machine = make_machine((0, None, None))
    throttle = machine.throttle(duty_cycle=duty_cycle)
    assert machine.work(throttle, 20, seconds=0.3) == []
    assert 20 * 0.3 / machine.seconds == pytest.approx(duty_cycle / 100)


def test_pauses_do_not_add_to_rests(make_machine):
    machine = make_machine((0, True, "cool"), (1000, False, "cool"))
    throttle = machine.throttle(on_battery="pause", duty_cycle=50)
    machine.work(throttle, 2)
    assert machine.rested(throttle) == 2


@pytest.mark.parametrize("power", [{"on_battery": "pause"}, {"duty_cycle": 1}])
def test_stop_ends_pauses_and_rests(make_machine, power):
    machine = make_machine((0, True, "cool"))
    events = machine.work(machine.throttle(**power), 1, should_stop=lambda: machine.seconds > 5)
    assert machine.seconds < 5.2 and Resumed not in map(type, events)


def test_unsupported(make_machine):
    machine = make_machine((0, None, None))
    throttle = machine.throttle(on_battery="pause", on_heat="slow")
    battery, thermal_state = throttle.unsupported()
    assert "no battery" in battery and "no temperatures" in thermal_state
    assert machine.throttle().unsupported() == [] and machine.work(throttle, 20) == []


@pytest.mark.parametrize(
    "wrong",
    [{"on_battery": "stop"}, {"on_heat": ""}, {"duty_cycle": 0}, {"duty_cycle": 101}, {"duty_cycle": True},
     {"duty_cycle": "70"}],
)  # fmt: skip
def test_invalid_power_policies(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PowerPolicy(**wrong)


# Runs


def test_rests_do_not_change_training(new_run, make_machine):
    """The weights are the same to the bit, and pauses aren't training time."""
    plain, rested = new_run("plain", steps=12), new_run("rested", steps=12)
    finish(plain)
    machine = make_machine((0, True, "cool"), (50, False, "hot"), (110, False, "cool"))
    events = finish(rested, power=PowerPolicy(on_battery="pause", on_heat="slow", duty_cycle=70))
    assert [type(e) for e in events if isinstance(e, Paused | Resumed | Throttled)][:3] == [Paused, Resumed, Throttled]
    assert isinstance(events[-1], Finished) and machine.seconds > 40 > events[-1].seconds
    assert contents(plain.path / "checkpoints/step-12") == contents(rested.path / "checkpoints/step-12")
    steps = [e for e in events if isinstance(e, Step)]
    assert all(s.seconds_left < 40 for s in steps[2:]) and steps[-1].seconds == events[-1].seconds
    logged = [e["event"] for e in read_log(rested) if e["event"] in ("paused", "resumed", "throttled")]
    assert logged[:3] == ["paused", "resumed", "throttled"]


def test_pause_saves_first_and_can_be_stopped(new_run, make_machine):
    run, events = new_run("run"), []
    machine = make_machine((0, False, "cool"), (0.5, True, "cool"))

    def should_stop():
        machine.seconds += 0.001  # the steps take no time of this clock
        return any(isinstance(e, Paused) for e in events) and machine.seconds > 100

    for event in train(run, load(run.path), should_stop=should_stop, power=PowerPolicy(on_battery="pause")):
        events.append(event)
        machine.seconds += isinstance(event, Step) * 4.0
    assert [type(e) for e in events[-3:]] == [CheckpointSaved, Paused, Stopped]
    step = events[-1].step
    assert events[-2].step == step and run.checkpoints()[-1].name == f"step-{step}"
    assert isinstance(finish(run, resume=True)[-1], Finished)


def test_start_on_battery(new_run, make_machine):
    run = new_run("run", steps=2)
    make_machine((0, True, None), (30, False, None))
    events = finish(run, power=PowerPolicy(on_battery="pause", on_heat="pause"))
    assert [type(e) for e in events[:4]][1:] == [TrainingWarning, Paused, Resumed]
    assert "temperatures" in events[1].message and events[2].step == 0
