"""Runs the application with uvicorn: its socket, timeouts and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterator
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxlm.server.errors import invalid, new_id
from mlxlm.utils.errors import ConfigError

IDLE_TIMEOUT = 75  # seconds
HEADER_TIMEOUT = 10.0  # seconds to send the headers of a request
WRITE_TIMEOUT = 30.0  # seconds to read something when the write buffer is full
MAX_HEADER_BYTES = 1 << 16


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free port.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            stack.pop_all()
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigError(problem, "`port=0` for a free port, or another `host`") from error
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """The URL of a socket that listens on `host`, for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


class Connection(H11Protocol):
    """An HTTP connection that is closed if the client is too slow to send headers or to read a response."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the headers."""
        super().connection_made(transport)
        self._timers: dict[str, TimerHandle] = {}
        self._start_timer("headers", HEADER_TIMEOUT)

    def handle_events(self) -> None:
        """Cancel the timer when the headers are complete; start it for the next request on the connection."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer("headers")
        elif "headers" not in self._timers and self.conn.trailing_data[0]:
            self._start_timer("headers", HEADER_TIMEOUT)

    def pause_writing(self) -> None:
        """Start the timer for the reader: the write buffer is full."""
        super().pause_writing()
        self._start_timer("response", WRITE_TIMEOUT)

    def resume_writing(self) -> None:
        """Cancel the timer: the client has read something."""
        super().resume_writing()
        self._cancel_timer("response")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for name in list(self._timers):
            self._cancel_timer(name)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or headers that are too large, with the API's error object."""
        problem = f"this is not a valid HTTP request, or its headers have more than {MAX_HEADER_BYTES >> 10} KiB"
        body = json.dumps(invalid(problem).body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers.append(("x-request-id", new_id("req_")))
        with contextlib.suppress(h11.LocalProtocolError):  # a response has already begun
            start = self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            self.transport.write(b"".join([start or b"", self.conn.send(h11.Data(data=body)) or b""]))
        self.transport.close()

    def _start_timer(self, name: str, seconds: float) -> None:
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


class Server(uvicorn.Server):
    """A uvicorn server that returns after SIGINT or SIGTERM; uvicorn's own raises the signal again.

    Args:
        config: uvicorn's settings.
        on_signal: Called at each signal with the number of signals so far.
    """

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]):
        super().__init__(config)
        self._on_signal, self._num_signals = on_signal, 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting connections; at the second signal, don't wait for running requests either."""
        self.force_exit, self.should_exit = self.should_exit, True
        self._num_signals += 1
        self._on_signal(self._num_signals)


def make_server(
    app: ASGIApp,
    shutdown_timeout: int,
    on_signal: Callable[[int], None] = lambda number: None,
    idle_timeout: int = IDLE_TIMEOUT,
) -> Server:
    """Create the server of an application.

    Args:
        app: The application.
        shutdown_timeout: Seconds that running requests may take to finish when the server stops.
        on_signal: See `Server`.
        idle_timeout: Seconds after which a connection without a request is closed.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=idle_timeout,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    return Server(config, on_signal)
