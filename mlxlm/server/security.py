"""Access control: API keys, allowed Host headers, and web pages of other origins."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxlm.server.errors import ApiError

_LOOPBACK_NAMES = frozenset(["localhost", "127.0.0.1", "[::1]"])


@dataclass(frozen=True)
class AccessRules:
    """Who may use the server.

    Attributes:
        api_keys: The valid keys; if empty, requests need none.
        allowed_hosts: The valid Host headers; if empty, all are. This stops DNS rebinding: a web page whose domain
            points to this machine has the server's origin for a browser.
        allow_ip_hosts: Whether any IP address is also a valid Host header. DNS can't rebind one.
        cors_origins: Origins of other web pages that may use the API; "*" for all.
    """

    api_keys: Sequence[str] = ()
    allowed_hosts: Collection[str] = ()
    allow_ip_hosts: bool = False
    cors_origins: Sequence[str] = ()

    @classmethod
    def for_host(cls, host: str, api_keys: Sequence[str], hosts: Sequence[str], origins: Sequence[str]) -> AccessRules:
        """The rules of a server that listens on `host`, and whose other names are `hosts`.

        A server that other machines can reach doesn't know all its names. With a key it accepts any name, since a
        page that uses DNS rebinding doesn't have the key.
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
        """Refuse other web pages. Browsers send simple requests without a preflight."""
        if origin is None or "*" in self.cors_origins or origin in self.cors_origins:
            return
        if origin.lower() not in (f"{scheme}://{host.lower()}", f"https://{host.lower()}"):
            raise ApiError(
                403, f"the web page {origin[:100]} may not use this server (try: mlxlm serve --cors-origin ORIGIN)"
            )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All keys are compared, so that the time doesn't depend on which one matches.
        matches = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in self.api_keys]
        if not any(matches):
            problem = "the API key is wrong" if given else "there is no API key (header Authorization: Bearer KEY)"
            raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class AccessMiddleware:
    """Raises ApiError for requests that the rules don't allow."""

    def __init__(self, app: ASGIApp, rules: AccessRules):
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            try:
                self._rules.check(scope)
            except ApiError as error:
                error.headers["connection"] = "close"  # its body isn't read
                raise
        await self._app(scope, receive, send)


def is_public(method: str, path: str) -> bool:
    """Whether a request needs no key: the files of the chat page, the health check, and CORS preflights."""
    return method == "OPTIONS" or path in ("/", "/health") or path.startswith("/page/")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address or name.

    Raises:
        OSError: The name is unknown.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _without_port(host: str) -> str:
    """The name in a Host header, in lower case."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
