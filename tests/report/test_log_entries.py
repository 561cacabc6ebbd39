"""Reading log.jsonl."""

import json

import pytest

from mlxlm.report.log_entries import entry_before_start, read_log_entries
from mlxlm.utils.errors import CheckpointError


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
