"""A second line between the processes of a run, beside MLX's own: who is still there, and short messages.

MLX's collectives wait for ever for a process that hangs or a network that is gone: nothing is closed, so nothing
fails. Here each process says each second that it is there, from a thread of its own.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlxlm.utils.errors import TrainingError

HEARTBEAT_INTERVAL = 1.0  # seconds between two signs of life
_LONGEST = 1 << 24  # bytes of a message: a configuration has thousands
_BYE = "bye"


class RankLostError(TrainingError):
    """A process of this run has ended, hangs, or can't be reached any more."""


class _Link:
    """A connection to one other process."""

    def __init__(self, connection: socket.socket, rank: int, heartbeat_timeout: float):
        self.socket, self.rank = connection, rank
        self.heard = time.monotonic()
        self.done = False  # it has said that it leaves
        self._rest = b""
        self._lock = threading.Lock()
        connection.settimeout(heartbeat_timeout)

    def send(self, message: Any) -> None:
        """Raises OSError."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self.socket.sendall(line)

    def receive(self) -> list[Any]:
        """The messages that have come; waits for some bytes. Raises OSError, also where the other side has closed."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionResetError
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ConnectionResetError
        return [json.loads(line) for line in lines]


class Heartbeat:
    """Watches the links of this process, carries what rank 0 has to say to all, and the facts of each to all.

    links: connected sockets and the rank at the other end of each; together those of all processes connect them all.
    heartbeat_timeout: seconds of silence after which a process is held to be lost.
    status: asked each second, from the pulse's thread, for what the others should know of this process.
    on_lost: called with what happened, again each second until `disconnect`.
    """

    def __init__(
        self,
        rank: int,
        links: list[tuple[socket.socket, int]],
        heartbeat_timeout: float,
        status: Callable[[], dict[str, Any]],
        on_lost: Callable[[str], None],
    ):
        self.rank, self.heartbeat_timeout = rank, heartbeat_timeout
        self.peer_status: dict[int, dict[str, Any]] = {}  # the facts of the others
        self._facts, self._beats = status, 0
        self._heard: dict[int, int] = {}
        self._links = [_Link(connection, other, heartbeat_timeout) for connection, other in links]
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._problem: str | None = None
        self._said: dict[int, Any] = {}
        self._newest = self._taken = 0
        self._left = False
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="mlxlm pulse", daemon=True)
        self._thread.start()

    def publish(self, value: Any) -> None:
        """From rank 0 to all: a JSON value."""
        self._newest += 1
        self._send({"number": self._newest, "value": value})

    def next_message(self) -> Any:
        """The next value that rank 0 says to all. Waits without using a core. Raises RankLost."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken + 1 in self._said or self._problem)
            if self._taken + 1 not in self._said:
                raise RankLostError(self._problem)
            self._taken += 1
            return self._said.pop(self._taken)

    def problem(self, wait: float = 0.0) -> str | None:
        """What has happened to another process, if anything, or does within `wait` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem, wait)
            return self._problem

    def disconnect(self, graceful: bool) -> None:
        """The end: the others are told, or find the line cut."""
        self._left = True
        if graceful:
            self._send(_BYE)
        self._waker.close()
        self._thread.join()
        for connection in (self._woken, *(link.socket for link in self._links)):
            connection.close()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without this thread nobody would notice that a rank is lost
            self._lose(f"rank {self.rank} can't watch the others ({type(error).__name__}: {error})")

    def _watch(self) -> None:
        beat = min(HEARTBEAT_INTERVAL, self.heartbeat_timeout / 4)
        spoken = 0.0
        while not self._left:
            if time.monotonic() - spoken >= beat:
                spoken = time.monotonic()
                self._beats += 1
                self._send({"from": self.rank, "beat": self._beats, "status": self._facts()})
                if self._problem is not None:
                    self._on_lost(self._problem)
            open_links = [link for link in self._links if not link.done]
            ready = _readable([self._woken, *(link.socket for link in open_links)], beat / 2)
            for link in open_links:
                if link.socket in ready:
                    self._read(link)
                elif time.monotonic() - link.heard > self.heartbeat_timeout:
                    link.done = True
                    self._lose(f"rank {link.rank} has not been heard of for {self.heartbeat_timeout:g} seconds")

    def _read(self, link: _Link) -> None:
        try:
            messages = link.receive()
        except (OSError, ValueError):
            link.done = True
            self._lose(f"rank {link.rank} has ended")
            return
        for message in messages:
            if message == _BYE:
                link.done = True
            elif "lost" in message:
                self._lose(message["lost"], source=link)
            elif "beat" in message:
                if message["from"] != self.rank and message["beat"] > self._heard.get(message["from"], 0):
                    self._heard[message["from"]] = message["beat"]
                    self.peer_status[message["from"]] = message["status"]
                    self._send(message, source=link)
            elif message["number"] > self._newest:
                self._send(message, source=link)
                with self._changed:
                    self._newest = message["number"]
                    self._said[self._newest] = message["value"]
                    self._changed.notify_all()

    def _lose(self, problem: str, source: _Link | None = None) -> None:
        with self._changed:
            if self._problem is not None:
                return
            self._problem = problem
            self._changed.notify_all()
        self._send({"lost": problem}, source)

    def _send(self, message: Any, source: _Link | None = None) -> None:
        for link in self._links:
            if link is not source and not link.done:
                try:
                    link.send(message)
                except OSError:  # reading from it will tell
                    continue


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that have something to read, after so many seconds at most; of any number of open files."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def listen(address: str, peers: int) -> socket.socket:
    """A socket on a free port of `address` for `peers` others to connect to."""
    return socket.create_server((address, 0), backlog=max(1, peers))


def make_secret() -> str:
    """What those who belong to this run know."""
    return secrets.token_hex(16)


def connect(address: tuple[str, int], secret: str, rank: int, heartbeat_timeout: float) -> socket.socket:
    """A link to the process that listens at `address`. Raises RankLost."""
    try:
        connection = _prompt(socket.create_connection(address, heartbeat_timeout))
        connection.sendall(f"{secret} {rank}\n".encode())
    except OSError as error:
        raise RankLostError(
            f"rank {rank} can't connect to {address[0]} port {address[1]}: {error.strerror or error}",
            "a firewall that lets the machines of the run reach each other",
        ) from None
    return connection


def accept(server: socket.socket, secret: str, peers: int, heartbeat_timeout: float) -> list[tuple[socket.socket, int]]:
    """Links from the `peers` processes that connect; whoever doesn't know `secret` is turned away. Raises RankLost."""
    links: list[tuple[socket.socket, int]] = []
    deadline = time.monotonic() + heartbeat_timeout
    while len(links) < peers:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except OSError:
            raise RankLostError(
                f"{peers - len(links)} processes of the run did not connect within {heartbeat_timeout:g} seconds",
                "a firewall that lets the machines of the run reach each other",
            ) from None
        words = _line(connection, min(1.0, deadline - time.monotonic())).decode("ascii", "replace").split()
        if (
            len(words) == 2
            and secrets.compare_digest(words[0].encode(), secret.encode())
            and words[1].isdecimal()
            and int(words[1]) not in (rank for _, rank in links)
        ):
            links.append((_prompt(connection), int(words[1])))
        else:
            connection.close()
    return links


def _line(connection: socket.socket, seconds: float) -> bytes:
    """The line that comes within so many seconds, all of it, or nothing."""
    line, deadline = b"", time.monotonic() + seconds
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 64:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            received = connection.recv(1)
            if not received or time.monotonic() > deadline:
                return b""
            line += received
        return line
    return b""


def _prompt(connection: socket.socket) -> socket.socket:
    """Short messages leave at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
