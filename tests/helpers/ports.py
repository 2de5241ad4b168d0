"""Ports of this machine for servers that must be told a port before they start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port: inside the context the system gives it to nobody who asks for any port.

    A server can listen on it all the same if it sets SO_REUSEADDR, as most do (Python's http.server, uvicorn, torch's
    TCPStore): Linux lets two such sockets have one port while only one of them listens.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
