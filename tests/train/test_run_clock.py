"""Runs with a time limit, by a simulated clock."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mlxlm.cli.main import _run
from mlxlm.train import Finished, Run, Step, TrainSettings, repeat_run
from mlxlm.train.run import TrainState
from mlxlm.train.run_clock import RunClock
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.train.training_runs import TIME_LIMIT, contents, finish, read_log, ticking_clock


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def simulated(limit, seconds_of, check=2.0, save=0.0, eval_every=20, state=None, until=None):
    """Simulate a run whose steps take `seconds_of(step, time)`, and each validation `check` and `save` seconds.

    Returns:
        Its clock, the time of its end, and the learning rates of its steps relative to the peak.
    """
    clock = FakeClock()
    settings = TrainSettings(steps=100, learning_rate=1.0, time_limit=limit, eval_every=eval_every)
    forecast = {"steps": 100, "step_seconds": 100.0, "seconds": 100.0 + check, "validations": 1}
    run_clock, rates = RunClock(settings, state, forecast, now=clock), [0.0] * (state.step if state else 0)
    while len(rates) < run_clock.steps and len(rates) != until:
        rates.append(run_clock.learning_rate(len(rates)))
        with run_clock.measure_step():
            clock.now += seconds_of(len(rates), clock.now)
        run_clock.lap("step", len(rates))
        if run_clock.should_validate(len(rates)):
            clock.now += check
            run_clock.lap("validation", len(rates))
            clock.now += save
            run_clock.lap("save", len(rates))
    return run_clock, clock.now, rates


SPEEDS = {
    "as forecast": lambda n, t: 1.0,
    "faster": lambda n, t: 0.2,
    "slower": lambda n, t: 5.0,
    "slows down": lambda n, t: 1 + 2 * (n > 60),
    "speeds up": lambda n, t: 3 - 2.5 * (n > 60),
    "other programs, on and off": lambda n, t: 0.1 + 0.2 * (t % 100 < 50),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
def test_ends_on_time_at_any_speed(speed, seed):
    draw = random.Random(seed)
    clock, end, rates = simulated(400.0, lambda n, t: speed(n, t) * draw.uniform(0.7, 1.3))
    assert len(rates) == clock.steps
    assert 0.95 * 400 <= end + 2 <= 400 * 1.02  # the plots, which take two seconds, come after it


@pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
def test_the_learning_rate_falls_as_planned_at_any_speed(speed):
    """With a cosine, 8% of the time has a rate within 15% of the final one, as without a time limit."""
    seconds = []

    def seconds_of(n, t):
        seconds.append(speed(n, t))
        return seconds[-1]

    _, _, rates = simulated(4000.0, seconds_of)
    at_the_floor = sum(s for s, rate in zip(seconds, rates, strict=True) if rate < 0.115)
    assert at_the_floor / sum(seconds) == pytest.approx(0.082, abs=0.01)
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True) and rates[-1] < 0.1001


def test_time_of_the_last_checkpoint_is_reserved():
    _, end, _ = simulated(400.0, SPEEDS["as forecast"], save=30.0)
    assert 0.9 * 400 <= end <= 400


def test_without_a_limit_the_clock_decides_nothing():
    run_clock, end, rates = simulated(None, SPEEDS["slower"])
    assert run_clock.steps == len(rates) == 100 and end > 500
    assert rates == [run_clock._settings.learning_rate_at((i + 1) / 100) for i in range(100)]


def test_too_little_time_is_one_step():
    assert len(simulated(0.5, lambda n, t: 10.0)[2]) == 1


def test_pauses_and_interruptions_do_not_count():
    speed = SPEEDS["as forecast"]
    _, _, whole = simulated(400.0, speed)
    clock, end, first = simulated(400.0, speed, until=50)
    state = TrainState(50, **clock.state)
    assert state.elapsed == end
    _, rest, rates = simulated(400.0, speed, state=state)
    assert 380 <= end + rest <= 404 and first + rates[50:] == pytest.approx(whole)
    clock = FakeClock()
    paused = RunClock(TrainSettings(steps=7, learning_rate=1.0, time_limit=60.0), now=clock)
    clock.now = 50.0
    paused.exclude_pause(45.0)
    assert paused.state["elapsed"] == 5 and paused.seconds_left(1) == 55


def test_speed_and_time_left():
    """The first step compiles: it counts for no rate. What is between steps counts in the time left, pauses don't."""
    clock = FakeClock()
    run_clock, found = RunClock(TrainSettings(steps=10, learning_rate=1.0), now=clock), []
    for step, seconds in enumerate((60.0, 1.0, 3.0), 1):
        with run_clock.measure_step():
            clock.now += seconds
        found.append((run_clock.rate(100), run_clock.seconds_left(step)))
        run_clock.lap("step", step)
        clock.now += 8.0  # a validation
        run_clock.lap("validation", step)
        clock.now += 500.0
        run_clock.exclude_pause(500.0)
    # After step 2: 9 seconds since the first step, for one step. After step 3: 20 for two.
    assert found == [(0.0, 540.0), (100.0, 8 * 9.0), (50.0, 7 * 10.0)] and run_clock.step_seconds == 64.0


def test_runs_with_a_time_limit(new_run):
    """A resumed run continues with the learning rates of the time left. A finished one has nothing left to do."""
    run, parts = (new_run(name, **TIME_LIMIT, lr_schedule="linear", warmup_steps=1) for name in ("run", "parts"))
    events = finish(run, now=ticking_clock())
    rates = [e.learning_rate for e in events if isinstance(e, Step)]
    assert isinstance(events[-1], Finished) and events[-1].step == len(rates) != 20
    assert [e for e in finish(run, resume=True) if isinstance(e, Step)] == []

    first = finish(parts, now=ticking_clock(), stop_at=8)
    rest = finish(Run.open(parts.path), resume=True, now=ticking_clock())
    found = [e.learning_rate for e in first + rest if isinstance(e, Step)]
    assert found[:8] == rates[:8] and found[8:] == sorted(found[8:], reverse=True) and found[8] < found[7]
    assert abs(len(found) - len(rates)) <= 0.1 * len(rates)


@pytest.mark.parametrize("check", [0.01, 0.2, 1.0, 2.9])
@pytest.mark.parametrize("save", [0.0, 0.1])
def test_validations_take_a_twentieth_of_the_time(check, save):
    _, end, rates = simulated(120.0, lambda n, t: 0.1, check, save, eval_every=None)
    validations = (end - 0.1 * len(rates)) / (check + save)
    assert (end - 0.1 * len(rates)) <= 0.05 * 120 + check + save
    assert validations == pytest.approx(min(20, 0.05 * 120 / (check + save)), abs=1.01)
    assert 0.95 * 120 <= end + 2 <= 1.02 * 120


def test_long_validation_runs_once():
    _, end, rates = simulated(120.0, lambda n, t: 0.1, 10.0, eval_every=None)
    assert end - 0.1 * len(rates) == pytest.approx(10) and 0.95 * 120 <= end + 2 <= 1.02 * 120


def test_data_check_does_not_count_as_saving(new_run, monkeypatch):
    run, lap, waited, costs = new_run("checked", **TIME_LIMIT, eval_tokens=64), RunClock.lap, [], []
    clock = FakeClock()

    def now():
        clock.now += 0.01
        return clock.now

    def wait():
        clock.now += 0 if waited else 5.0
        waited.append(1)

    def record(self, activity, step):
        lap(self, activity, step)
        costs.append(self._seconds["save"])

    check = nullcontext(SimpleNamespace(done=lambda: False, result=wait))
    monkeypatch.setattr("mlxlm.train.loop._check_data", lambda data: check)
    monkeypatch.setattr(RunClock, "lap", record)
    finish(run, now=now, stop_at=12)
    assert waited and 0 < max(costs) < 1


def test_loading_does_not_count_as_validation(new_run, monkeypatch):
    run = new_run("loaded", **TIME_LIMIT, eval_tokens=64)
    finish(run, stop_at=5)
    clock, load_checkpoint, lap, costs = FakeClock(), Run.load_checkpoint, RunClock.lap, []

    def slow(*arguments):
        clock.now += 10
        return load_checkpoint(*arguments)

    def record(self, activity, step):
        lap(self, activity, step)
        costs.append((activity, self._seconds["validation"], self.elapsed))

    monkeypatch.setattr(Run, "load_checkpoint", slow)
    monkeypatch.setattr(RunClock, "lap", record)
    monkeypatch.setattr(RunClock, "should_validate", lambda self, step: step == 5)
    finish(Run.open(run.path), resume=True, stop_at=6, now=clock)
    assert costs[0][2] > 10 and costs[1][:2] == ("validation", 0)


def test_repeat_is_bit_equal(new_run, tmp_path, capsys):
    run = new_run("original", **{**TIME_LIMIT, "eval_every": None}, lr_schedule="linear", eval_tokens=64)
    first = finish(run, now=ticking_clock(), stop_at=8)
    rest = finish(Run.open(run.path), resume=True, now=ticking_clock())
    assert isinstance(rest[-1], Finished) and rest[-1].step > first[-1].step
    copy = repeat_run(tmp_path / "copy", Run.open(run.path))
    again = finish(copy, stop_at=5, now=ticking_clock(9.0)) + finish(Run.open(copy.path), resume=True)

    def entries(run, event):
        return [(e["step"], e.get("learning_rate"), e["loss"]) for e in read_log(run) if e["event"] == event]

    for event in ("step", "validation"):
        assert entries(copy, event) == entries(run, event)
    assert len(entries(run, "validation")) > 1
    assert again[-1].step == rest[-1].step
    assert contents(copy.checkpoints()[-1]) == contents(run.checkpoints()[-1])
    (copy.path / "repeat_plan.jsonl").write_text('{"event": "step", "step": 1, "learning_rate": 1}\n')
    with pytest.raises(ConfigError, match="repeat_plan.jsonl is damaged"):
        finish(Run.open(copy.path), resume=True)
    assert _run(["pretrain", "--repeat", str(run.path), "--out", str(tmp_path / "other"), "--steps", "3"]) == 2
    assert "--repeat takes --out" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="hasn't finished .try: mlxlm pretrain --resume"):
        repeat_run(tmp_path / "none", new_run("unfinished", **TIME_LIMIT))


def test_pretraining_on_answers_only_is_no_fine_tuning(new_run):
    run = new_run("answers", mask_prompt=True, packing="best-fit")
    assert run.resume_command == f"mlxlm pretrain --resume {run.path}"
    finish(run, stop_at=2)
    assert run.command == "pretrain"


def test_repeat_checks_the_data(stopped, tmp_path):
    manifest = stopped.data / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"{", b"{ ", 1))
    with pytest.raises(DataError, match="has changed since"):
        repeat_run(tmp_path / "copy", stopped)
    stopped.data.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="--resume .* --data FOLDER"):
        repeat_run(tmp_path / "copy", stopped)
