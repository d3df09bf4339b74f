"""Addresses of the pods behind a headless service."""

import socket


def addresses_of(service: str, port: int) -> list[str]:
    """Return the IP addresses of a service's pods in order; empty if it has none yet.

    A pod with addresses of both families counts once: IPv6 ones are returned where there are no others.
    """
    try:
        found = socket.getaddrinfo(service, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    by_family: dict[int, set[str]] = {}
    for family, *_, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
