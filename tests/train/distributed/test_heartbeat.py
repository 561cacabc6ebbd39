"""Heartbeats of three ranks in threads: messages, status, and what each learns of a rank that ends or is silent."""

import contextlib
import socket
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Listener

import pytest

from mlxlm.train import RankLostError
from mlxlm.train.distributed.heartbeat import Heartbeat, accept_ranks, connect_to_rank0


@pytest.fixture
def three_ranks():
    """`three_ranks(on_lost)`: the heartbeats of three ranks."""
    started = []

    def start(on_lost=lambda _problem: None) -> list[Heartbeat]:
        pairs = {1: Pipe(), 2: Pipe()}
        connections = [{rank: pair[0] for rank, pair in pairs.items()}, {0: pairs[1][1]}, {0: pairs[2][1]}]
        for rank in range(3):
            started.append(Heartbeat(connections[rank], 5.0, lambda rank=rank: {"load": rank}, on_lost))
        return started

    yield start
    for heartbeat in started:
        if heartbeat._thread.is_alive():
            heartbeat.close()


def test_messages_of_rank_0_reach_all_once_and_in_order(three_ranks):
    zero, *others = three_ranks()
    for i in range(20):
        zero.publish({"number": i})
    zero.publish(None)
    for heartbeat in others:
        assert [heartbeat.next_message() for _ in range(21)] == [*({"number": i} for i in range(20)), None]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and len(zero.peer_status) < 2:
        time.sleep(0.01)
    assert zero.peer_status == {1: {"load": 1}, 2: {"load": 2}}


def test_all_learn_who_has_ended(three_ranks):
    problems = []
    zero, one, two = three_ranks(problems.append)
    one.close()
    for heartbeat in (zero, two):
        assert heartbeat.problem(wait=5) == "rank 1 has ended"
    with pytest.raises(RankLostError, match="rank 1 has ended"):
        two.next_message()
    assert set(problems) <= {"rank 1 has ended"}


def test_a_silent_rank_is_lost():
    connection, other = Pipe()
    called = threading.Event()
    start = time.monotonic()
    heartbeat = Heartbeat({4: connection}, 0.3, dict, lambda _problem: called.set())
    assert heartbeat.problem(wait=5) == "rank 4 has not been heard of for 0.3 seconds"
    assert 0.25 < time.monotonic() - start < 5 and called.wait(5)
    heartbeat.close()
    other.close()


def test_strangers_are_turned_away():
    try:
        listener = Listener(("127.0.0.1", 0), authkey=b"secret")
    except OSError:
        pytest.skip("no sockets may be opened here")
    port = listener.address[1]
    with listener, socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        accepted = {}
        thread = threading.Thread(target=lambda: accepted.update(accept_ranks(listener, 1)))
        thread.start()
        with pytest.raises(RankLostError, match="can't connect to 127.0.0.1 port"):
            connect_to_rank0(["127.0.0.1"], port, b"wrong", 1)
        connection = connect_to_rank0(["127.0.0.1"], port, b"secret", 3)
        thread.join(timeout=5)
        assert list(accepted) == [3]
        with contextlib.suppress(ConnectionResetError):
            stranger.settimeout(5)
            while stranger.recv(1 << 10):  # the challenge, then the end
                pass
    for end in (connection, accepted[3]):
        end.close()
    with pytest.raises(RankLostError, match="can't connect to 127.0.0.1"):
        connect_to_rank0(["127.0.0.1"], port, b"secret", 1)
