"""Heartbeats and short messages between rank 0 and the other processes of a run, beside MLX's collectives.

Protects from a process that hangs or a network that is gone: MLX's collectives would wait forever, because nothing is
closed, so nothing fails. Here a thread of each process sends a heartbeat every second over a TCP connection to rank 0,
with its status (whether to stop, battery, heat, whether its data is unchanged).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from mlxlm.utils.errors import TrainingError

HEARTBEAT_INTERVAL = 1.0  # seconds
_POLL_SECONDS = 0.2
_MAX_MESSAGE = 1 << 24  # bytes; a configuration has thousands
_CONNECT_TIMEOUT = 5.0  # seconds for each address


class RankLostError(TrainingError):
    """Another process of this run has ended, hangs, or can't be reached any more."""


class Heartbeat:
    """Watches the connections of this process, and carries the messages of rank 0 and the status of the other ranks.

    Args:
        connections: By rank: on rank 0 those of all others, on the others that of rank 0.
        timeout: Seconds of silence after which a rank is lost.
        status: Called every second by the heartbeat thread; returns JSON values for the other end.
        on_lost: Called with the problem by the heartbeat thread, every second until `close`.

    Attributes:
        peer_status: The last status from each connection.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        timeout: float,
        status: Callable[[], dict[str, Any]],
        on_lost: Callable[[str], None],
    ):
        self.peer_status: dict[int, dict[str, Any]] = {}
        self._open = dict(connections)
        self._connections = list(connections.values())
        self._last_heard = dict.fromkeys(connections, time.monotonic())
        self._timeout, self._status, self._on_lost = timeout, status, on_lost
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._messages: deque[Any] = deque()
        self._problem: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="mlxlm heartbeat", daemon=True)
        self._thread.start()

    def publish(self, message: Any) -> None:
        """On rank 0: send a JSON value to all other ranks."""
        self._send({"message": message})

    def next_message(self) -> Any:
        """On another rank: return the next message of rank 0. Waits without using a core. Raises RankLostError."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._problem)
            if self._problem and not self._messages:
                raise RankLostError(self._problem)
            return self._messages.popleft()

    def problem(self, wait: float = 0.0) -> str | None:
        """Return what happened to another rank, now or within `wait` seconds; None if nothing did."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem, wait)
            return self._problem

    def close(self) -> None:
        """End the heartbeat: this rank is lost for the others, unless rank 0 has told them that the run ends."""
        self._closed = True
        self._thread.join()
        for connection in self._connections:
            connection.close()

    def _watch(self) -> None:
        interval, sent_at = min(HEARTBEAT_INTERVAL, self._timeout / 4), -float("inf")
        while not self._closed:
            if time.monotonic() - sent_at >= interval:
                sent_at = time.monotonic()
                self._send({"status": self._status()})
                if self._problem is not None:
                    self._on_lost(self._problem)
            ready = wait(list(self._open.values()), _POLL_SECONDS)
            for rank, connection in list(self._open.items()):
                if connection in ready:
                    self._receive(rank, connection)
                elif time.monotonic() - self._last_heard[rank] > self._timeout:
                    del self._open[rank]
                    self._lose(f"rank {rank} has not been heard of for {self._timeout:g} seconds")

    def _receive(self, rank: int, connection: Connection) -> None:
        try:
            message = json.loads(connection.recv_bytes(_MAX_MESSAGE))
        except (OSError, EOFError, ValueError):
            del self._open[rank]
            self._lose(f"rank {rank} has ended")
            return
        self._last_heard[rank] = time.monotonic()
        if "status" in message:
            self.peer_status[rank] = message["status"]
        elif "lost" in message:
            self._lose(message["lost"])
        else:
            with self._changed:
                self._messages.append(message["message"])
                self._changed.notify_all()

    def _lose(self, problem: str) -> None:
        if self._problem is None:
            with self._changed:
                self._problem = problem
                self._changed.notify_all()
            self._send({"lost": problem})

    def _send(self, message: Any) -> None:
        content = json.dumps(message).encode()
        with self._sending:
            for connection in list(self._open.values()):
                with suppress(OSError):  # reading will tell that it has ended
                    connection.send_bytes(content)


def accept_ranks(listener: Listener, count: int) -> dict[int, Connection]:
    """On rank 0: return the connections of the `count` other ranks. Turns away whoever doesn't know the secret."""
    connections: dict[int, Connection] = {}
    while len(connections) < count:
        with suppress(OSError, EOFError, ValueError, AuthenticationError):
            connection = listener.accept()
            connections[int(connection.recv_bytes(16))] = connection
            _send_at_once(connection)
    return connections


def connect_to_rank0(addresses: list[str], port: int, secret: bytes, rank: int) -> Connection:
    """On another rank: connect to rank 0 at the first of `addresses` that can be reached. Raises RankLostError."""
    problem = None
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_TIMEOUT).close()  # `Client` would wait for minutes
            connection = Client((address, port), authkey=secret)
            connection.send_bytes(str(rank).encode())
        except (OSError, EOFError, AuthenticationError) as error:
            problem = problem or f"{address} port {port}: {getattr(error, 'strerror', None) or error}"
        else:
            _send_at_once(connection)
            return connection
    raise RankLostError(
        f"rank {rank} can't connect to {problem}", "a firewall that lets the machines of the run reach each other"
    )


def _send_at_once(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
