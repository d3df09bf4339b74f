"""Listening sockets, and servers on them: on IPv4 and IPv6, over TLS if the pod has a certificate."""

import socket
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from grpo_worker.common import tls

_BACKLOG = 2048  # as uvicorn's own


class Server:
    """HTTP server of an application, which listens from now on and answers when it runs.

    ``host``: address to listen on; None: all of the pod's addresses. ``grace``: seconds for answers under way
    when it stops.
    """

    def __init__(self, app: Starlette, port: int, host: str | None = None, grace: int | None = None) -> None:
        self._sockets = listeners(port, host)
        # uvicorn's own configuration of logging would close the handlers of the process, such as StoredLog.
        config = uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=grace)
        config.load()
        config.ssl = tls.server_context()
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until the process gets a signal, or ``stop``."""
        self._server.run(self._sockets)

    def stop(self) -> None:
        """Let ``run`` return."""
        self._server.should_exit = True


def listeners(port: int, host: str | None = None) -> list[socket.socket]:
    """Return listening sockets. ``host``: address; None: all of IPv4, and of IPv6 where there is any.

    These are two sockets, not one for both: callers over IPv4 keep their plain addresses.
    """
    if host is not None:
        return [_listener(host, port)]
    sockets = [_listener("0.0.0.0", port)]
    with suppress(OSError):  # a kernel without IPv6
        sockets.append(_listener("::", port))
    return sockets


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
