"""log.jsonl: entries, full disks, rewinding after a crash."""

import errno
import json
from pathlib import Path

import pytest

from mlxlm.report.log_entries import entry_before_start, read_log_entries
from mlxlm.train import CheckpointNotSaved, CheckpointSaved, Sample, Step, Validation
from mlxlm.train.events import RunLog
from mlxlm.utils.errors import CheckpointError


def step(n):
    return Step(n, 10, n * 100, 3.5, 1e-3, 0.5, 1000.0, n * 0.1, 2.0, 10**6)


def test_entries(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    odd = "a\u2028b\x85\ud800 </script>\n"
    for event in (step(1), Sample(1, "", odd), CheckpointNotSaved(1, "full", "free 3 GB"), CheckpointSaved(1, tmp_path),
                  Validation(1, 100, 800.0, float("inf"), 9.0, True)):  # fmt: skip
        log.record(event)
    lines = log.path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 6 and lines[-1] == ""
    entries = list(read_log_entries(log.path))
    assert [e["event"] for e in entries] == ["step", "sample", "checkpoint_not_saved", "checkpoint_saved", "validation"]
    assert entries[0] == {"event": "step", "step": 1, "steps": 10, "tokens": 100, "loss": 3.5, "learning_rate": 1e-3,
                          "grad_norm": 0.5, "tokens_per_second": 1000.0, "seconds": 0.1, "seconds_left": 2.0,
                          "memory": 10**6}  # fmt: skip
    assert entries[1]["text"] == odd and entries[1]["time"].endswith("+00:00")
    assert "path" not in entries[3] and entries[4]["perplexity"] is None


class FullFile:
    """A file that takes `room` more bytes."""

    def __init__(self, file, disk):
        self.file, self.disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def tell(self):
        return self.file.tell()

    def truncate(self, size):
        self.file.truncate(size)

    def write(self, data):
        if self.disk["room"] == 0:
            raise OSError(self.disk["error"], "refused")
        taken = data[: self.disk["room"]]
        self.disk["room"] -= len(taken)
        return self.file.write(taken)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_lines_are_kept_while_the_disk_is_full(tmp_path, monkeypatch, number):
    log, disk = RunLog(tmp_path / "log.jsonl"), {"room": 10**6, "error": number}
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: FullFile(real(path, *args, **kwargs), disk))
    log.record(step(1))
    disk["room"] = 25  # of a line
    log.record(step(2))
    disk["room"] = 0
    log.record(step(3))
    monkeypatch.undo()
    assert [e["step"] for e in read_log_entries(log.path)] == [1] and log.path.read_bytes().endswith(b"}\n")
    log.record(Validation(3, 3, 1.0, 2.7, 1.0, True))
    assert [e["step"] for e in read_log_entries(log.path)] == [1, 2, 3, 3]


def test_full_disk_is_retried_once_a_second(tmp_path, monkeypatch):
    """All lines that wait are tried together: at each of many steps that would be quadratic work."""
    log, clock, disk = RunLog(tmp_path / "log.jsonl"), [0.0], {"room": 0, "error": errno.ENOSPC}
    opened, real = [], Path.open
    monkeypatch.setattr("mlxlm.train.events.time.monotonic", lambda: clock[0])
    with monkeypatch.context() as full:
        full.setattr(
            Path, "open", lambda path, *args, **kwargs: opened.append(1) or FullFile(real(path, *args, **kwargs), disk)
        )
        for n in range(1, 31):
            clock[0] += 0.1
            log.record(step(n))
        assert len(opened) == 3
    log.record(step(31))
    assert not list(read_log_entries(log.path))
    log.flush()  # before a checkpoint all of it has to be there
    assert [e["step"] for e in read_log_entries(log.path)] == list(range(1, 32))


def test_other_errors_are_raised(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(CheckpointError, match="cannot write .*log.jsonl"):
        RunLog(tmp_path / "log.jsonl").record(step(1))


def test_rewind(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    log.rewind(5, validated=True)  # a run that was killed before its first line
    assert not log.path.exists()
    for n in (1, 2, 3):
        log.record(step(n))
        log.record(Validation(n, n, 1.0, 2.7, 1.0, True))
    with log.path.open("ab") as file:
        file.write(b"\0\0\0" + b'{"event": "st')
    log.rewind(2, validated=False)
    assert [(e["event"], e["step"]) for e in read_log_entries(log.path)] == [
        ("step", 1), ("validation", 1), ("step", 2),
    ]  # fmt: skip
    log.record(Validation(2, 2, 1.0, 2.7, 1.0, True))
    log.rewind(2, validated=True)
    assert [e["event"] for e in read_log_entries(log.path)][-1] == "validation"


def test_rewind_with_nothing_to_remove(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "log.jsonl")
    log.record(step(1))
    log.record(step(2))
    monkeypatch.setattr("mlxlm.train.events.atomic_write", None)
    assert log.rewind(2, validated=True) == {"step"}
    with pytest.raises(TypeError):
        log.rewind(1, validated=True)


def test_rewind_keeps_nan_and_ends_the_last_line(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    lines = [b'{"event": "validation",  "step": 1, "perplexity": NaN}', b'{"event": "step", "step": 1, "loss": 1e999}']
    log.path.write_bytes(b"\n".join([*lines, b'{"event": "step", "step": 2}\n']))
    assert log.rewind(1, validated=True) == {"validation", "step"}
    assert log.path.read_bytes() == b"\n".join([*lines, b""])
    log.path.write_bytes(b"\n".join(lines))
    log.rewind(1, validated=True)
    assert log.path.read_bytes() == b"\n".join([*lines, b""])


def test_invalid_lines_are_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    good = {"event": "step", "step": 3}
    lines = [b"", b"null", b"[1]", b'{"event": 3, "step": 1}', b'{"event": "step", "step": "1"}', b'{"step": 1}',
             b'{"event": "step", "step": -1}', b"\xff\xfe", b"[" * 100_000, json.dumps(good).encode()]  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    assert list(read_log_entries(path)) == [good]
    assert list(read_log_entries(tmp_path / "none.jsonl")) == []


def test_entry_before_start(tmp_path):
    path, good = tmp_path / "log.jsonl", {"event": "forecast", "seconds": 1.5, "steps": 3}
    wrong = [
        {"event": "forecast", "seconds": "long", "steps": 3},
        {"event": "forecast"},
        {"event": "forecast", "seconds": 1.5, "steps": 0},
        {"event": "forecast", "seconds": -1.5, "steps": 3},
    ]
    entries = [*wrong, good, {"event": "started"}, {"event": "model_size_chosen", "seconds": 1}]  # fmt: skip
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert entry_before_start(path, "forecast", ("seconds", "steps")) == good
    assert entry_before_start(path, "model_size_chosen", ("seconds",)) is None
    assert entry_before_start(tmp_path / "none.jsonl", "forecast", ()) is None


def test_long_line(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.report.log_entries._MAX_LINE", 1000)
    (tmp_path / "log.jsonl").write_bytes(b"x" * 2000)
    with pytest.raises(CheckpointError, match="a line of more than"):
        list(read_log_entries(tmp_path / "log.jsonl"))
