"""TensorBoard and Weights & Biases: the values that they receive, resumes, and failures."""

import json
import sys
from types import SimpleNamespace

import pytest

from mlxlm.train import Finished, Run, Step, TrainingWarning, Validation
from mlxlm.utils.errors import CheckpointError, PlatformError
from tests.train.training_runs import finish, read_log


def test_missing_library(new_run, monkeypatch):
    run = new_run("run", steps=2)
    for options, library, extra in (
        ({"tensorboard": True}, "tensorboardX", "tensorboard"),
        ({"wandb": "p"}, "wandb", "wandb"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(PlatformError, match=rf"{library} is not installed .*pip install 'mlxlm\[{extra}\]'"):
            finish(run, **options)
    assert read_log(run) == []


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    found = {tag: [(s.step, s.value) for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    texts = {tag: [t.step for t in reader.Tensors(tag)] for tag in reader.Tags()["tensors"]}
    return found, texts


def test_tensorboard_has_every_point_once(new_run):
    pytest.importorskip("tensorboardX", reason="pip install 'mlxlm[tensorboard]'")
    run = new_run("run", sample_every=10, sample_tokens=4)
    events = finish(run, stop_at=13, tensorboard=True)
    (run.path / "checkpoints/step-13").rename(run.path / "checkpoints/.step-13.1.partial")  # as if the power was cut
    events = [e for e in events if e.step <= 10] + finish(Run.open(run.path), resume=True, tensorboard=True)
    assert not [e for e in events if isinstance(e, TrainingWarning)]
    found, texts = scalars(run.path / "tensorboard")
    steps = [e for e in events if isinstance(e, Step)]
    assert [s for s, _ in found["train/loss"]] == list(range(1, 21))
    assert [v for _, v in found["train/loss"]] == pytest.approx([e.loss for e in steps])
    assert [v for _, v in found["train/learning_rate"]] == pytest.approx([e.learning_rate for e in steps])
    validations = [(e.step, e.bits_per_byte) for e in events if isinstance(e, Validation)]
    assert dict(found["validation/bits_per_byte"]) == pytest.approx(dict(validations))
    assert texts == {"sample/text_summary": [10, 20]}


class FakeWandb:
    """Stores values by run id, as W&B does; `step` of a resumed run is the one after its last."""

    class Settings(SimpleNamespace):
        pass

    def __init__(self, fails_at=None):
        self.runs, self.inits, self.finished, self.fails_at = {}, [], 0, fails_at

    def init(self, **options):
        self.inits.append(options)
        history = self.runs.setdefault(options["id"], [])

        def log(values, step):
            if step == self.fails_at:
                raise ConnectionError("no network\nat all")
            history.append((step, values))

        def finish():
            self.finished += 1

        return SimpleNamespace(step=history[-1][0] + 1 if history else 0, summary={}, log=log, finish=finish)


def test_wandb_continues_its_run(new_run, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    run = new_run("run")
    finish(run, stop_at=13, wandb="my project")
    (run.path / "checkpoints/step-13").rename(run.path / "checkpoints/.step-13.1.partial")
    events = finish(Run.open(run.path), resume=True, wandb="my project")
    [(name, history)] = fake.runs.items()
    assert json.loads((run.path / "wandb.json").read_text()) == {"id": name, "project": "my project"}
    assert [s for s, v in history if "train/loss" in v] == list(range(1, 21))
    assert [s for s, v in history if "validation/loss" in v] == [10, 20]
    assert history[-2][1]["train/loss"] == [e for e in events if isinstance(e, Step)][-1].loss
    assert fake.inits[1]["resume"] == "allow" and fake.inits[0]["config"]["settings"] == run.settings.to_dict()
    assert fake.finished == 2


def test_wandb_project_can_not_change(new_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    run = new_run("run", steps=4)
    finish(run, stop_at=2, wandb="one")
    with pytest.raises(CheckpointError, match="is in the W&B project one, not in two .*`wandb=one`"):
        finish(run, resume=True, wandb="two")


@pytest.mark.parametrize("fails_at", [1, 5])
def test_failing_tracker_warns_once(new_run, monkeypatch, fails_at):
    fake = FakeWandb(fails_at)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    run = new_run("run", steps=6)
    events = finish(run, wandb="p")
    [warning] = [e for e in events if isinstance(e, TrainingWarning)]
    assert warning == TrainingWarning(
        fails_at, "Weights & Biases gets no more events of this run: ConnectionError: no network at all"
    )
    assert isinstance(events[-1], Finished) and fake.finished == 1
    assert [e["message"] for e in read_log(run) if e["event"] == "training_warning"] == [warning.message]


def test_wandb_offline(new_run, monkeypatch, capfd):
    pytest.importorskip("wandb", reason="pip install 'mlxlm[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = new_run("run", steps=3, sample_every=3, sample_tokens=3)
    events = finish(run, wandb="my-project")
    assert [e.message for e in events if isinstance(e, TrainingWarning)] == []
    [file] = (run.path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    for name in (b"train/loss", b"validation/bits_per_byte", b"my-project", b"learning_rate", b"hidden_size"):
        assert name in content
    assert capfd.readouterr() == ("", "")
