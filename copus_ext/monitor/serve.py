"""The report of a run as a page that follows it: read-only, on this machine unless a token says
otherwise.

    GET /            the page
    GET /data.json   what it shows now; 304 as long as nothing was written
    GET /plotly.js   plotly, from the package

Nothing else is answered, no path leads to a file. Where a token is asked for, `/?token=...` sets a
cookie once; the token itself is in no page and no log.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import html
import ipaddress
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from copus_ext.monitor.page import PLOTLY_SOURCE, plotly_code, policy
from copus_ext.monitor.source import Body, Source

logger = logging.getLogger(__name__)

LEAST_TOKEN = 12
"""Characters of a token."""
_TOKEN_BYTES, _MOST_TOKEN = 18, 1000
_ROOM_S = 1.0
MOST_READERS = 32
"""Connections at once. Beyond that, who has waited longest with its request makes room."""
REQUEST_S, ANSWER_S = 15.0, 60.0
"""A request has so long to come, and an answer to go."""
_LANDING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>COPUS</title>
<meta http-equiv="refresh" content="0;url=/"></head>
<body><a href="/">To the report</a></body></html>
"""


def serve(
    run: Path, *, address: str, port: int, token: str | None = None, makes_token: bool = False
) -> None:
    """Serves the report of a run until Ctrl-C.

    Args:
        run: directory of the run, or its journal.
        address: to listen on; other than this machine's own only with a token.
        port: TCP port; 0 takes a free one.
        token: what a reader must know; None asks for nothing.
        makes_token: make one instead, and show the link with it.

    Raises:
        ValueError: an address that needs a token and has none, a short token, or no such run.
        OSError: the address and port cannot be had.
    """
    made = secrets.token_urlsafe(_TOKEN_BYTES) if makes_token else None
    server = make_server(run, address=address, port=port, token=made or token)
    host, number = server.server_address[:2]
    shown = f"[{host!s}]" if ":" in str(host) else host
    way = f"?token={made or '...'}" if server.token else ""
    print(f"http://{shown}:{number}/{way} follows {run}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def read_token(path: Path) -> str:
    """The token in the first line of a file; not in a command line, which others can see.

    Raises:
        ValueError: others may read it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ValueError(f"--token-file {path} can be read by others; run: chmod 600 {path}")
        line = file.readline(_MOST_TOKEN)
    return line.decode(errors="replace").strip()


class ReportServer(ThreadingHTTPServer):
    """One run, any number of readers.

    Args:
        at: address and port.
        source: what is read.
        token: what a reader must know, or None.
    """

    daemon_threads = True
    request_queue_size = MOST_READERS

    def __init__(self, at: tuple[str, int], source: Source, token: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        self.source, self.token = source, token
        self.is_local = is_local(at[0])
        # Readers hold this and not the token, which a person may use elsewhere too.
        self.session = secrets.token_urlsafe(32)
        self._places = threading.BoundedSemaphore(MOST_READERS)
        self._guard = threading.Lock()
        self._open: dict[socket.socket, tuple[bool, float]] = {}
        super().__init__(at, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own."""
        if not self._places.acquire(blocking=False):
            with self._guard:
                oldest = min(self._open, key=self._open.__getitem__, default=None)
                self._cut_off(oldest)
            if not self._places.acquire(timeout=_ROOM_S):
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The whole of that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def expect(self, connection: socket.socket, *, is_answered: bool, within_s: float) -> None:
        """Gives a connection so long for what comes next: a request, or the rest of its answer."""
        with self._guard:
            self._open[connection] = (is_answered, time.monotonic() + within_s)

    def forget(self, connection: socket.socket) -> None:
        """It is about to be closed."""
        with self._guard:
            self._open.pop(connection, None)

    def service_actions(self) -> None:
        """Ends connections that take too long; called twice a second."""
        now = time.monotonic()
        with self._guard:
            for connection in [c for c, (_, until) in self._open.items() if until < now]:
                self._cut_off(connection)

    def _cut_off(self, connection: socket.socket | None) -> None:
        """Wakes the thread that waits for it."""
        if connection is not None:
            del self._open[connection]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away or fell silent is nothing to speak of."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.warning("a request could not be answered: %r", error)

    @property
    def cookie(self) -> str:
        """Name of the cookie: all servers of one host share their cookies."""
        return f"copus_{self.server_address[1]}"


def make_server(run: Path, *, address: str, port: int, token: str | None) -> ReportServer:
    """A server that listens and does not answer yet; arguments and errors as of `serve`."""
    if token is None and not is_local(address):
        raise ValueError(
            f"--address {address or 'of all networks'} can be reached from other machines; give "
            "--token or --token-file too, or listen on 127.0.0.1 and come through ssh -L"
        )
    if token is not None and len(token) < LEAST_TOKEN:
        raise ValueError(
            f"the token of --token-file is short; it must have at least {LEAST_TOKEN} characters"
        )
    _plotly()  # if it is missing, that is said now
    return ReportServer((address, port), Source(run), token)


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_own_host(header: str | None, *, local_only: bool) -> bool:
    """Whether a Host header names this machine and not a name that somebody else may point at it.

    The port is not looked at: a tunnel has another.

    Args:
        header: as sent.
        local_only: whether only names of the loopback count.
    """
    if not header:
        return False
    try:
        name = (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not local_only and name in {socket.gethostname().lower(), socket.getfqdn().lower()}
    return address.is_loopback or not local_only


class _Handler(BaseHTTPRequestHandler):
    """Answers one reader. Each is served in a thread of its own and gives up after a while."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "copus", ""
    timeout = ANSWER_S
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_one_request(self) -> None:
        """Waits for a request and answers it."""
        self.server.expect(self.connection, is_answered=False, within_s=REQUEST_S)
        super().handle_one_request()

    def finish(self) -> None:
        """After the last."""
        self.server.forget(self.connection)
        super().finish()

    def do_GET(self) -> None:
        """Sends a page or its data."""
        self._answer()

    def do_HEAD(self) -> None:
        """The same without a body."""
        self._answer()

    def _answer(self) -> None:
        # To make a page of a long run may take its time; to take it may not.
        self.server.expect(self.connection, is_answered=True, within_s=math.inf)
        if not is_own_host(self.headers.get("Host"), local_only=self.server.is_local):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "This server has another name.")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "That is no address.")
            return
        if self.server.token is not None and not self._is_known():
            self._let_in(parse_qs(url.query).get("token", [""])[0])
            return
        try:
            self._send_path(url.path)
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            logger.warning("the run cannot be read: %s", error)
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "The run cannot be read now.")

    def _send_path(self, path: str) -> None:
        if path == "/":
            self._send(self.server.source.page(), "text/html; charset=utf-8")
        elif path == "/data.json":
            data, tag = self.server.source.data()
            if self.headers.get("If-None-Match") == tag:
                self._head(HTTPStatus.NOT_MODIFIED, 0, {"ETag": tag})
                return
            self._send(data, "application/json", {"ETag": tag})
        elif path == f"/{PLOTLY_SOURCE}":
            keep = {"Cache-Control": "private, max-age=86400"}
            self._send(_plotly(), "text/javascript; charset=utf-8", keep)
        else:
            self._say(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _is_known(self) -> bool:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self.server.cookie)
        return found is not None and _same(found.value, self.server.session)

    def _let_in(self, token: str) -> None:
        """A page that goes on to the report: the cookie of a first answer to a link from elsewhere
        would not come with a redirect."""
        if not _same(token, self.server.token or ""):
            self._say(HTTPStatus.FORBIDDEN, "Open this page with ?token=... once.")
            return
        cookie = f"{self.server.cookie}={self.server.session}; Path=/; HttpOnly; SameSite=Strict"
        self._send(Body(_LANDING.encode()), "text/html; charset=utf-8", {"Set-Cookie": cookie})

    def _say(self, status: HTTPStatus, line: str) -> None:
        text = f"<!doctype html><title>COPUS</title><p>{html.escape(line)}</p>\n"
        # What is still on its way in would be taken for the next request.
        more = {"Connection": "close"}
        self._send(Body(text.encode()), "text/html; charset=utf-8", more, status=status)

    def _send(
        self,
        body: Body,
        kind: str,
        more: dict[str, str] | None = None,
        *,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        fields = {"Content-Type": kind, **(more or {})}
        data = body.plain
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(data) > 1000:
            data = body.zipped
            fields["Content-Encoding"] = "gzip"
        self._head(status, len(data), fields)
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: HTTPStatus, length: int, fields: dict[str, str]) -> None:
        self.server.expect(self.connection, is_answered=True, within_s=ANSWER_S)
        self.send_response(status)
        usual = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy(is_served=True) + "; frame-ancestors 'none'",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept-Encoding, Cookie",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (usual | fields).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no GET and no HEAD, or no HTTP."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        allowed = {"Allow": "GET, HEAD", "Connection": "close", "Content-Type": "text/plain"}
        self._head(status, 0, allowed)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line could hold the token."""


@functools.cache
def _plotly() -> Body:
    return Body(plotly_code().encode(), level=6)


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
