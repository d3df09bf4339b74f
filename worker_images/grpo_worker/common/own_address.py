"""Addresses of this pod."""

import socket


def only_ipv6(host: str | None = None) -> bool:
    """Return whether the pod has IPv6 addresses only. ``host``: its name, which kubelet resolves to them."""
    try:
        found = socket.getaddrinfo(host or socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def loopback() -> str:
    """Return the loopback address of the servers that listen on one family only, as SGLang's does."""
    return "::1" if only_ipv6() else "127.0.0.1"
