"""HTTP transport for requests without a time limit: work that its server bounds by progress."""

import socket
import ssl

import httpx

UNLIMITED = 1e9  # seconds
# A peer whose node is gone answers no probe: TCP ends the connection within a minute.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def patient_transport(verify: ssl.SSLContext | bool = True) -> httpx.HTTPTransport:
    """Return a transport that notices lost peers, and holds any number of requests at the same time.

    ``verify``: see common/tls.py.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.HTTPTransport(verify=verify, limits=limits, socket_options=_KEEP_ALIVE)
