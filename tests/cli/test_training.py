"""Training several runs one after another."""

from pathlib import Path
from types import SimpleNamespace

import pytest


def test_a_stop_in_the_last_step_of_a_run_ends_the_sweep(monkeypatch, capsys):
    """The run is finished, and the next ones are not started."""
    from mlxlm.cli import training
    from mlxlm.train import Finished

    made = []

    def stops_in_its_last_step(run, *, stop, **_options):
        stop.requested = True
        return Finished(1, 1.0, 1.0, 1.0, 1.0, 1, run)

    monkeypatch.setattr(training, "run_training", stops_in_its_last_step)
    monkeypatch.setattr(training, "is_finished", lambda run: False)
    runs = [(name, lambda name=name: made.append(name) or name) for name in ("one", "two")]
    sweep = SimpleNamespace(COMMAND="mlxlm scaling", path=Path("my grid"))
    assert training.train_sweep(sweep, runs) == ([], 143) and made == ["one"]
    assert capsys.readouterr().err.splitlines()[-2:] == ["Continue with:", "mlxlm scaling --resume 'my grid'"]


@pytest.mark.parametrize("has_report", [True, False])
def test_a_finished_run_gets_its_report(monkeypatch, tmp_path, has_report):
    """A sweep that was killed before the report of a run writes it when it continues."""
    from mlxlm.cli import training
    from mlxlm.report import REPORT_FILE
    from mlxlm.train import Finished

    if has_report:
        (tmp_path / REPORT_FILE).write_text("")
    trained = []
    monkeypatch.setattr(training, "run_training", lambda run, **_: trained.append(run) or Finished(*[1] * 6, run.path))
    monkeypatch.setattr(training, "is_finished", lambda run: True)
    run = SimpleNamespace(path=tmp_path)
    assert training.train_sweep(SimpleNamespace(), [("one", lambda: run)]) == ([], 0)
    assert trained == ([] if has_report else [run])
