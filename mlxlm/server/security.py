"""Who may use the server: API keys, the Host header, the pages of browsers."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxlm.server.errors import ApiError

_LOOPBACK_NAMES = frozenset(["localhost", "127.0.0.1", "[::1]"])


@dataclass(frozen=True)
class AccessRules:
    """Who may use the server.

    Attributes:
        api_keys: Keys of which a request must have one; empty for none.
        allowed_hosts: Names that the Host header may have; empty for any. They stop a web page whose own name was
            pointed at this machine ("DNS rebinding"), which for a browser makes the server part of that page.
        allow_ip_hosts: Whether it may also be any IP address, which can't be pointed elsewhere.
        cors_origins: Origins of web pages that may use the API, besides the server's own; "*" for any.
    """

    api_keys: Sequence[str] = ()
    allowed_hosts: Collection[str] = ()
    allow_ip_hosts: bool = False
    cors_origins: Sequence[str] = ()

    @classmethod
    def for_host(cls, host: str, api_keys: Sequence[str], hosts: Sequence[str], origins: Sequence[str]) -> AccessRules:
        """Rules for a server at the address `host`, which may also be called one of `hosts`.

        A server that others can reach doesn't know all its names. With a key any name will do, since a page of
        somebody else doesn't have the key.
        """
        local = is_loopback(host)
        bound = f"[{host}]" if ":" in host else host
        allowed = {name.lower() for name in (bound, *_LOOPBACK_NAMES, *hosts)} if local or hosts or not api_keys else ()
        return cls(tuple(api_keys), frozenset(allowed), not local, tuple(origins))

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request that isn't allowed."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _without_port(host)
        by_address = self.allow_ip_hosts and _is_address(name)
        if self.allowed_hosts and name not in self.allowed_hosts and not by_address:
            name = name[:100]
            raise ApiError(
                403, f"this server isn't called {name!r} (try: http://localhost, or mlxlm serve --allowed-host {name})"
            )
        self._check_origin(headers.get("origin"), scope["scheme"], host)
        if self.api_keys and not is_public(scope["method"], scope["path"]):
            self._check_key(headers)

    def _check_origin(self, origin: str | None, scheme: str, host: str) -> None:
        """Refuse other web pages. Browsers send some of their requests without asking first."""
        if origin is None or "*" in self.cors_origins or origin in self.cors_origins:
            return
        parts = urlsplit(origin)
        if parts.netloc.lower() != host.lower() or parts.scheme not in (scheme, "https"):
            raise ApiError(
                403, f"the web page {origin[:100]} may not use this server (try: mlxlm serve --cors-origin ORIGIN)"
            )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, so that the time doesn't tell which one is right.
        matches = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in self.api_keys]
        if not any(matches):
            problem = "the API key is wrong" if given else "there is no API key (header Authorization: Bearer KEY)"
            raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class AccessMiddleware:
    """Answers requests that `rules` don't allow with an error."""

    def __init__(self, app: ASGIApp, rules: AccessRules):
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            try:
                self._rules.check(scope)
            except ApiError as error:
                error.headers["connection"] = "close"  # its body isn't read
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_public(method: str, path: str) -> bool:
    """Whether a request needs no key: the chat page, which asks for it, the health check, and CORS preflights."""
    return method == "OPTIONS" or path in ("/", "/health") or path.startswith("/page/")


def is_loopback(host: str) -> bool:
    """Whether an address or name is only reachable from this machine.

    Raises:
        OSError: The name is unknown.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _without_port(host: str) -> str:
    """The lower-case name of a Host header."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
