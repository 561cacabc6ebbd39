"""Signals that ask a command to stop."""

import os
import signal

import pytest

from mlxlm.cli.stop_signals import StopRequest, on_stop_signal


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def hangup():
    """SIGHUP as in a terminal, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(number):
    names = []
    with StopRequest(names.append).catch_signals() as stop:
        assert not stop()
        send(number)
        assert stop() and len(names) == 1 and stop.exit_code == 128 + number
        send(signal.SIGHUP, signal.SIGHUP)
        assert len(names) == 1
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)


def test_handlers_are_restored_and_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with on_stop_signal(lambda *_: pytest.fail("SIGHUP is handled")):
            send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGHUP, before)
