"""Runs with a time limit, by a simulated clock."""

import json
import random

import pytest

from mlxlm.train import Finished, Run, Step, StepsChanged, TrainSettings
from mlxlm.train.deadline import Deadline
from mlxlm.train.train_state import TrainState
from tests.train.training_runs import TIME_LIMIT, finish, read_log, ticking_clock

FORECAST = {"steps": 100, "step_seconds": 100.0, "seconds": 102.0, "validations": 1}


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def simulated(limit, seconds_of, check=2.0, eval_every=20, steps=100, state=None, until=None):
    """Simulate a run whose steps take `seconds_of(step)`. Returns its deadline, the end and the number of steps."""
    clock = FakeClock()
    settings = TrainSettings(steps=steps, learning_rate=1.0, time_limit=limit, eval_every=eval_every, save_every=0)
    deadline, done = Deadline(settings, state, FORECAST, clock), state.step if state else 0
    while done < deadline.steps and done != until:
        done += 1
        clock.now += seconds_of(done)
        deadline.record_time("step")
        deadline.steps_changed(done)
        if done % eval_every == 0 or done == deadline.steps:
            clock.now += check
            deadline.record_time("validation")
    return deadline, clock.now, done


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "speed",
    [lambda n: 1.0, lambda n: 0.2, lambda n: 5.0, lambda n: 1 + 2 * (n > 60), lambda n: 3 - 2.5 * (n > 60)],
    ids=["as forecast", "faster", "slower", "slows down", "speeds up"],
)
def test_ends_on_time_at_any_speed(speed, seed):
    draw = random.Random(seed)
    deadline, end, done = simulated(400.0, lambda n: speed(n) * draw.uniform(0.7, 1.3))
    assert done == deadline.steps
    assert 0.95 * 400 <= end + 2 <= 400 * 1.02  # the plots, which take two seconds, come after it


def test_time_of_the_last_checkpoint_is_reserved():
    """Only the first and the last validation of this run are the best ones, which are saved."""
    clock = FakeClock()
    settings = TrainSettings(steps=100, learning_rate=1.0, time_limit=400.0, eval_every=20, save_every=0)
    deadline, done = Deadline(settings, None, FORECAST, clock), 0
    while done < deadline.steps:
        done += 1
        clock.now += 1
        deadline.record_time("step")
        deadline.steps_changed(done)
        if done % 20 == 0 or done == deadline.steps:
            clock.now += 2
            deadline.record_time("validation")
            if done == 20 or done == deadline.steps:
                clock.now += 30
                deadline.record_time("save")
    assert 0.9 * 400 <= clock.now <= 400


@pytest.mark.parametrize("save_every", [0, 50])
def test_time_of_checkpoints_by_time_is_reserved(save_every):
    """A checkpoint takes 15 seconds. Without those every 30 seconds, 82 steps of a second would fit."""
    clock = FakeClock()
    settings = TrainSettings(
        steps=100, learning_rate=1.0, time_limit=100.0, eval_every=0, save_every=save_every, save_minutes=0.5
    )
    deadline = Deadline(settings, None, {**FORECAST, "seconds": 100.0}, clock)
    deadline._cost["save"] = 15.0
    clock.now += 1
    deadline.record_time("step")
    assert deadline.steps_changed(1)
    assert 45 <= deadline.steps <= 60


def test_steps_do_not_change_without_a_limit():
    clock = FakeClock()
    deadline = Deadline(TrainSettings(steps=7, learning_rate=1.0), None, FORECAST, clock)
    for done in range(1, 8):
        clock.now += 100
        deadline.record_time("step")
        assert not deadline.steps_changed(done)
    assert deadline.steps == 7 and deadline.seconds_left is None


def test_too_little_time_is_one_step():
    _, _, done = simulated(0.5, lambda n: 10.0)
    assert done == 1


def test_pauses_and_interruptions_do_not_count():
    deadline, end, done = simulated(400.0, lambda n: 1.0, until=50)
    state = TrainState(done, **deadline.state)
    assert state.elapsed == end
    _, rest, _ = simulated(400.0, lambda n: 1.0, state=state)
    assert 380 <= end + rest <= 404
    clock = FakeClock()
    paused = Deadline(TrainSettings(steps=7, learning_rate=1.0, time_limit=60.0), None, None, clock)
    clock.now = 50.0
    paused.exclude_pause(45.0)
    assert paused.elapsed == 5 and paused.seconds_left == 55


def test_runs_with_a_time_limit(new_run):
    """The learning rates follow the planned steps. A resumed run continues with its plan and the time left."""
    run, parts = (new_run(name, **TIME_LIMIT, lr_schedule="linear", warmup_steps=1) for name in ("run", "parts"))
    events = finish(run, now=ticking_clock())
    changes = {e.step: e.steps for e in events if isinstance(e, StepsChanged)}
    steps, planned = [e for e in events if isinstance(e, Step)], 20
    for event in steps:
        assert event.steps == planned
        assert event.learning_rate == run.settings.learning_rate_at(event.step - 1, planned)
        planned = changes.get(event.step, planned)
    assert isinstance(events[-1], Finished) and events[-1].step == steps[-1].step == planned != 20
    logged = [(e["step"], e["steps"]) for e in read_log(run) if e["event"] == "steps_changed"]
    assert logged == list(changes.items())
    assert [e for e in finish(run, resume=True) if isinstance(e, Step)] == []

    first = finish(parts, now=ticking_clock(), stop_at=8)
    rest = finish(Run.open(parts.path), resume=True, now=ticking_clock())
    planned = [e for e in first if isinstance(e, StepsChanged)][-1].steps
    assert next(e for e in rest if isinstance(e, Step)).steps == planned
    assert abs(rest[-1].step - events[-1].step) <= 0.1 * events[-1].step


def by_time(limit, check, step=0.1, save=0.0):
    """Simulate a run that validates by time. Returns the seconds and the number of validations, and the end."""
    clock = FakeClock()
    settings = TrainSettings(steps=100, learning_rate=1.0, time_limit=limit, eval_every=None, save_every=0)
    forecast = {**FORECAST, "step_seconds": 100 * step, "seconds": 100 * step + check}
    deadline, done, validations = Deadline(settings, None, forecast, clock), 0, 0
    while done < deadline.steps:
        done += 1
        clock.now += step
        deadline.record_time("step")
        deadline.steps_changed(done)
        if deadline.should_validate(done):
            validations += 1
            clock.now += check
            deadline.record_time("validation")
            clock.now += save
            deadline.record_time("save")
    return validations * (check + save), validations, clock.now


@pytest.mark.parametrize("check", [0.01, 0.2, 1.0, 2.9])
@pytest.mark.parametrize("save", [0.0, 0.1])
def test_validations_take_a_twentieth_of_the_time(check, save):
    seconds, validations, end = by_time(120.0, check, save=save)
    assert seconds <= 0.05 * 120 + check + save
    assert validations == pytest.approx(min(20, 0.05 * 120 / (check + save)), abs=1.01)
    assert 0.95 * 120 <= end + 2 <= 1.02 * 120


def test_long_validation_runs_once():
    _, validations, end = by_time(120.0, 10.0)
    assert validations == 1 and 0.95 * 120 <= end + 2 <= 1.02 * 120


def test_steps_that_change_after_saving_are_saved(new_run, monkeypatch, tmp_path):
    """If a pause saves a step, and the number of steps changes after it, log and checkpoint agree."""
    run = new_run("paused", **TIME_LIMIT, eval_tokens=64)
    paused = []

    def rest(self, should_stop):
        if self.finished == 3:
            yield from self.save()
            paused.append(self.deadline.steps)

    monkeypatch.setattr("mlxlm.train.trainer.Trainer.rest", rest)
    monkeypatch.setattr(Deadline, "_steps_that_fit", lambda self, done, left: 9 if done >= 3 else 40)
    finish(run, now=ticking_clock(), stop_at=3)
    state = json.loads((run.checkpoints()[-1] / "state.json").read_text())
    assert [e["steps"] for e in read_log(run) if e["event"] == "steps_changed"][-1] == state["steps"] == 12 != paused[0]


def test_data_check_does_not_count_as_saving(new_run, monkeypatch):
    run, record_time, waited, costs = new_run("checked", **TIME_LIMIT, eval_tokens=64), Deadline.record_time, [], []
    clock = FakeClock()

    def now():
        clock.now += 0.01
        return clock.now

    def wait(self):
        clock.now += 0 if waited else 5.0
        waited.append(self)

    def record(self, what):
        record_time(self, what)
        costs.append(self._cost["save"])

    monkeypatch.setattr("mlxlm.train.data_check.DataCheck.wait", wait)
    monkeypatch.setattr(Deadline, "record_time", record)
    finish(run, now=now, stop_at=12)
    assert waited and 0 < max(costs) < 1


def test_loading_does_not_count_as_validation(new_run, monkeypatch):
    run = new_run("loaded", **TIME_LIMIT, eval_tokens=64)
    finish(run, stop_at=5)
    clock, load_checkpoint, costs = FakeClock(), Run.load_checkpoint, []

    def slow(*arguments):
        clock.now += 10
        return load_checkpoint(*arguments)

    monkeypatch.setattr(Run, "load_checkpoint", slow)
    monkeypatch.setattr(Deadline, "steps_changed", lambda self, _done: costs.append(dict(self._cost)))
    monkeypatch.setattr("mlxlm.train.trainer.Trainer.should_validate", lambda self: self.finished == self.first)
    finish(Run.open(run.path), resume=True, stop_at=7, now=clock)
    assert costs and costs[0]["validation"] == 0
