"""Running checks: what passes, fails and is skipped; nothing personal is in a result."""

import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from mlxlm.doctor import check
from mlxlm.doctor.check import Check, CheckFailed, CheckSkipped, run_check, without_personal_data
from mlxlm.doctor.worker import run_in_processes
from mlxlm.utils.errors import MlxlmError
from tests.paths import ROOT


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    "run, status, reason, values",
    [
        (lambda: {"a": 1}, "passed", "", {"a": 1}),
        (lambda: {"a": math.nan, "b": [math.inf, {"c": 1.0}]}, "passed", "", {"a": None, "b": [None, {"c": 1.0}]}),
        (raising(CheckFailed("wrong", {"error": 2.0})), "failed", "wrong", {"error": 2.0}),
        (raising(CheckSkipped("no Metal")), "skipped", "no Metal", {}),
        (raising(MlxlmError("no room", "less")), "failed", "no room (try: less)", {}),
        (raising(RuntimeError("two\nlines")), "failed", "RuntimeError: two lines", {}),
    ],
)
def test_outcomes(run, status, reason, values):
    result = run_check(Check("part", "name", run, "case"))
    assert (result.status, result.reason, result.values) == (status, reason, values)
    assert bool(result.traceback) == ("Error" in reason or "room" in reason)
    assert result.title == "name: case" and result.seconds >= 0
    json.dumps(asdict(result), allow_nan=False)


def test_personal_data_is_removed(monkeypatch):
    monkeypatch.setattr(check.socket, "gethostname", lambda: "annas-macbook.local")
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/anna"))
    check._names.cache_clear()
    texts = [
        "cannot read /Users/anna/models/a.json on annas-macbook.local",
        "/home/anna/x: /srv/people/anna/.cache, /root/y",
        "/private/var/folders/ab/xyz/T/run, annas-macbook",
    ]
    try:
        cleaned = without_personal_data({"texts": texts, "n": 1, "path": [f"{ROOT}/mlxlm/doctor/check.py"]})
    finally:
        check._names.cache_clear()
    assert "anna" not in json.dumps(cleaned)
    assert cleaned["texts"][0] == "cannot read ~/models/a.json on HOST"
    assert cleaned["texts"][2] == "TMPDIR/run, HOST"
    assert cleaned["n"] == 1 and cleaned["path"] == ["mlxlm/doctor/check.py"]


SUITE = """
import os, sys, time
from mlxlm.doctor.check import Check
from mlxlm.doctor.worker import serve

def write():
    open(os.path.join(sys.argv[1], "file"), "w").close()
    print("not a message")
    return {"folder": sys.argv[1], "process": os.getpid()}

def crash():
    print("the driver has failed in /home/anna/x", file=sys.stderr, flush=True)
    os.abort()

serve([Check("a", "first", write), Check("a", "crash", crash, "case"), Check("b", "hang", lambda: time.sleep(100)),
       Check("b", "last", lambda: {"process": os.getpid()})], int(sys.argv[2]))
"""


def test_a_crash_and_a_hang_fail_alone():
    progress = list(run_in_processes([sys.executable, "-c", SUITE], max_seconds=6))
    assert progress[0] == (None, 4) and {total for _, total in progress} == {4}
    first, crash, hang, last = (result for result, _ in progress[1:])
    assert first.status == last.status == "passed" and first.values["process"] != last.values["process"]
    assert (crash.status, crash.title) == ("failed", "crash: case")
    assert crash.reason == "the process ended with SIGABRT: the driver has failed in ~/x"
    assert "the driver has failed in ~/x" in crash.traceback
    assert (hang.status, hang.reason) == ("failed", "it took longer than 6 seconds")
    assert not Path(first.values["folder"]).exists()


@pytest.mark.parametrize("code", ["raise SystemExit('no suite')", "print('{\"checks\": 2}'); raise SystemExit('none')"])
def test_checks_that_can_not_start_are_an_error(code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MlxlmError, match="the process ended with exit code 1: no"):
        list(run_in_processes([sys.executable, "-c", code]))
    assert not list(tmp_path.iterdir())
