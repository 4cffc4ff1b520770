"""Who may open the page: this machine without further ado, others with a token that works once.

The first visit with the token is given a cookie, with which reloads and the websocket come; a link that somebody overhears later
is worth nothing. Requests whose `Host` or `Origin` is not the page's own are refused (DNS rebinding, other sites' scripts).
"""

from __future__ import annotations

import ipaddress
import secrets
from urllib.parse import urlsplit

COOKIE = "vla_rl_session"
LOOPBACK_NAMES = ("localhost",)


class Access:
    """The tokens and cookies of one server."""

    def __init__(self, host: str) -> None:
        self.local = is_loopback(host)
        """Only this machine can reach the page, so no token is needed."""
        self._token = "" if self.local else secrets.token_urlsafe(16)
        self._cookies: set[str] = set()

    def link(self, address: str) -> str:
        """What a person opens; `address` is `http://HOST:PORT/`."""
        return address if self.local else f"{address}?token={self._token}"

    def redeem(self, token: str) -> str | None:
        """A new cookie for the token, once; None for any other text. The next visitor needs `link` again: it has a new token."""
        if not self._token or not secrets.compare_digest(token.encode(), self._token.encode()):
            return None
        self._token = secrets.token_urlsafe(16)
        cookie = secrets.token_urlsafe(24)
        self._cookies.add(cookie)
        return cookie

    def admits(self, cookie: str | None) -> bool:
        """Whether a request may see the page."""
        return self.local or (cookie is not None and cookie in self._cookies)

    def own_host(self, host_header: str) -> bool:
        """Whether a `Host` header names this server; a name that somebody pointed at this machine does not, when it is local."""
        name = urlsplit(f"//{host_header}").hostname or ""
        return not self.local or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_origin(origin: str | None, host_header: str) -> bool:
    """Whether a websocket was opened by a page of this server (programs that are no browser send no origin)."""
    return origin is None or urlsplit(origin).netloc == host_header
