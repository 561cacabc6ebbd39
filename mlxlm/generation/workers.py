"""The other processes of a model that is split over several: the connections of rank 0 and its workers.

Before each step of an engine, rank 0 sends the texts that begin or were cancelled. Everything else follows from these,
so no operation on a cache, no draw and no end of a text is sent.

These messages and heartbeats have TCP connections of their own. MLX's sums keep a core busy while they wait, and don't
always notice that a machine is gone: a process with a pending sum then blocks forever, and only another thread can end
it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlxlm.backend.error_text import describe_error
from mlxlm.backend.process_group import ProcessGroup, versions
from mlxlm.generation import device_thread
from mlxlm.utils.errors import PlatformError

_HEARTBEAT = 2.0  # seconds
_TIMEOUT = 20.0  # seconds without a heartbeat, after which a process is lost
_CONNECT_TIMEOUT = 60.0
_GRACE = 1.0  # seconds in which a connection says that a rank is gone, before the error of a sum does
_MAX_LINE = 1 << 28  # bytes of a message

Lost = Callable[[str], None]


class Connection:
    """Messages in JSON between rank 0 and a worker.

    Args:
        connected: The socket.
        name: What is at the other end.
        on_lost: Called once, in another thread, with a message when that is gone.
    """

    def __init__(self, connected: socket.socket, name: str, on_lost: Lost):
        self._socket, self._name, self._on_lost = connected, name, on_lost
        self._lock = threading.RLock()  # a message may be sent by the garbage collector while another is
        self._closed = threading.Event()
        self.received: SimpleQueue[Any] = SimpleQueue()
        connected.settimeout(_TIMEOUT)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for task in (self._receive, self._send_heartbeats):
            threading.Thread(target=task, name=f"mlxlm-{name}", daemon=True).start()

    def send(self, message: Any = None) -> None:
        """Send a message; None is a heartbeat."""
        line = (b"" if message is None else json.dumps(message).encode()) + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError as error:
            self._lose(error.strerror or str(error))

    def close(self) -> None:
        """Close the connection. The other side has been told, or has told."""
        self._closed.set()
        self._socket.close()

    def _receive(self) -> None:
        reason = "its connection was closed"
        try:
            with self._socket.makefile("rb") as lines:
                while line := lines.readline(_MAX_LINE):
                    if line != b"\n":
                        self.received.put(json.loads(line))
        except TimeoutError:
            reason = f"it hasn't answered for {_TIMEOUT:.0f} seconds"
        except (OSError, ValueError) as error:
            reason = str(error)
        self._lose(reason)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(_HEARTBEAT):
            self.send()

    def _lose(self, reason: str) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._on_lost(f"{self._name} has ended, or can't be reached any more: {reason}")


class Workers:
    """The other ranks, as rank 0 sees them. Use it as a context: at its end, they end.

    Args:
        group: All ranks. They must call `run_worker` now.
        on_lost: Called in another thread with a message when one of them is gone, or has failed. It must end the
            process, which may wait for that rank forever.

    Raises:
        PlatformError: A worker can't connect.
        RankLostError: A worker has ended.
    """

    def __init__(self, group: ProcessGroup, on_lost: Lost):
        self.group, self.on_lost, self.closed = group, on_lost, False
        self._numbers = count()
        secret, connections = secrets.token_hex(16), dict[int, Connection]()
        with socket.create_server(("", 0)) as server:
            host, port = _own_address(), server.getsockname()[1]
            group.broadcast_object({"address": [host, port], "secret": secret, "versions": versions()})
            deadline = time.monotonic() + _CONNECT_TIMEOUT
            while len(connections) < group.size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connected, _ = server.accept()
                except TimeoutError:
                    problem = f"the other processes can't connect to this one, at {host} port {port}"
                    raise PlatformError(problem, "a firewall that lets them, or another network") from None
                if (hello := _read_hello(connected, secret)) is not None:
                    name = f"rank {hello['rank']} on {hello['host']}"
                    connections[hello["rank"]] = Connection(connected, name, on_lost)
        self._connections = [connections[rank] for rank in sorted(connections)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        def end() -> None:
            self.send(do="end")
            self.closed = True

        device_thread.run(end)  # between two steps, which need all ranks
        for connection in self._connections:
            connection.close()

    def send(self, **message: Any) -> None:
        """Send a message to all."""
        if not self.closed:
            for connection in self._connections:
                connection.send(message)

    def receive(self) -> list[Any]:
        """Wait for a message from each, and return them in the order of their ranks."""
        return [connection.received.get() for connection in self._connections]

    def next_number(self) -> int:
        """A number for a new model or engine."""
        return next(self._numbers)

    def drop_with(self, owner: object, **what: int) -> None:
        """Have the workers forget a model or an engine as soon as `owner` is deleted."""
        weakref.finalize(owner, self.send, do="drop", **what)


@dataclass(frozen=True)
class ModelWorkers:
    """The parts of a model that workers have.

    Attributes:
        workers: The workers.
        number: The number of the model.
        max_kv_bytes: What each rank has room for.
    """

    workers: Workers
    number: int
    max_kv_bytes: int

    def add_engine(self, engine: object, **settings: Any) -> EngineWorkers:
        """Have the workers make an engine with these settings, which exists as long as `engine`."""
        number = self.workers.next_number()
        self.workers.send(do="engine", model=self.number, engine=number, **settings)
        self.workers.drop_with(engine, engine=number)
        return EngineWorkers(self.workers, number)


@dataclass(frozen=True)
class EngineWorkers:
    """The workers' engines that take the steps of one of rank 0."""

    workers: Workers
    number: int

    def step(self, new: Sequence[dict[str, Any]], cancelled: Sequence[int]) -> bool:
        """Have them take a step with new texts and numbers of cancelled ones. Returns whether they haven't ended."""
        self.workers.send(do="step", engine=self.number, new=new, cancelled=cancelled)
        return not self.workers.closed

    def limit(self, limits: dict[str, Any]) -> None:
        """Have them use these `Engine.limits`."""
        self.workers.send(do="limit", engine=self.number, limits=limits)

    def fail(self, error: BaseException) -> None:
        """End all ranks: this one hasn't finished a step that the others have."""
        time.sleep(_GRACE)
        self.workers.on_lost(describe_error(error) if isinstance(error, Exception) else repr(error))


def connect_to_rank_0(group: ProcessGroup, on_lost: Lost) -> Connection | None:
    """Connect a worker to rank 0, which has called `Workers(group, ...)`; None if it has ended. See `run_worker`."""
    hello = group.broadcast_object()
    if hello is None:  # rank 0 ended before it had workers
        return None
    if hello["versions"] != versions():
        problem = f"the machines differ: rank 0 has {hello['versions']}, rank {group.rank} has {versions()}"
        raise PlatformError(problem, "the same versions on all of them")
    host, port = hello["address"]
    try:
        connected = socket.create_connection((host, port), _CONNECT_TIMEOUT)
    except OSError as error:
        problem = f"rank 0 can't be reached at {host} port {port}: {error.strerror or error}"
        raise PlatformError(problem, "a firewall that lets the processes reach each other") from None
    line = json.dumps({"secret": hello["secret"], "rank": group.rank, "host": socket.gethostname()})
    connected.sendall(line.encode() + b"\n")
    return Connection(connected, "rank 0", on_lost)


def _own_address() -> str:
    """The address of rank 0, which this process is, as the other ranks know it."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        with suppress(OSError, ValueError, LookupError, AttributeError):
            address: str = json.loads(Path(hostfile).read_text())[0][0]
            return address.rpartition(":")[0]
    coordinator = os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
    return coordinator or os.environ.get("NCCL_HOST_IP") or socket.gethostname()


def _read_hello(connected: socket.socket, secret: str) -> dict[str, Any] | None:
    """The first message of a worker; None, and the connection is closed, from anyone else."""
    line = b""
    with suppress(OSError, ValueError):
        connected.settimeout(5)
        while not line.endswith(b"\n") and len(line) < 1 << 10 and (byte := connected.recv(1)):
            line += byte
        hello = json.loads(line)
        if isinstance(hello, dict) and secrets.compare_digest(str(hello.get("secret")), secret):
            return hello
    connected.close()
    return None
