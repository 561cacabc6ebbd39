"""A Mac stays awake while it works; the time that a machine has slept."""

import os
import subprocess
import time

import pytest

from mlxlm.backend import platform as sleep
from mlxlm.backend.platform import prevent_sleep, seconds_asleep


@pytest.fixture
def caffeinate(monkeypatch):
    """A stand-in for caffeinate: the list of its processes."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            assert command == ["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]
            super().__init__(["sleep", "600"], **options)
            processes.append(self)

    monkeypatch.setattr(sleep.subprocess, "Popen", Popen)
    monkeypatch.setattr(sleep.sys, "platform", "darwin")
    return processes


def test_caffeinate_runs_inside_the_block(caffeinate):
    with prevent_sleep():
        (process,) = caffeinate
        assert process.poll() is None
        assert os.getpgid(process.pid) != os.getpgrp()  # a Ctrl-C in the terminal doesn't reach it
    assert process.returncode is not None


def test_caffeinate_ends_with_an_error(caffeinate):
    with pytest.raises(KeyboardInterrupt), prevent_sleep():
        raise KeyboardInterrupt
    assert caffeinate[0].returncode is not None


def test_other_systems_start_nothing(caffeinate, monkeypatch):
    monkeypatch.setattr(sleep.sys, "platform", "linux")
    with prevent_sleep():
        assert caffeinate == []


@pytest.mark.parametrize(("system", "clock"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC_RAW")])
def test_seconds_asleep(monkeypatch, system, clock):
    """The clock that goes on in sleep, minus `monotonic`, which doesn't; the time of day may be set meanwhile."""
    now = {"awake": 100.0, "asleep": 0.0}

    def clock_gettime(number):
        assert number == getattr(time, clock)
        return now["awake"] + now["asleep"] + 7

    monkeypatch.setattr(sleep.sys, "platform", system)
    monkeypatch.setattr(sleep.time, "clock_gettime", clock_gettime)
    monkeypatch.setattr(sleep.time, "monotonic", lambda: now["awake"])
    before = seconds_asleep()
    now["awake"] += 50
    assert seconds_asleep() == before
    now["asleep"] += 3600
    assert seconds_asleep() == before + 3600


def test_this_machine_has_these_clocks():
    assert abs(seconds_asleep() - seconds_asleep()) < 1
