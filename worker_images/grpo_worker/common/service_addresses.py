"""Addresses of the pods behind a headless service."""

import socket


def addresses_of(service: str, port: int) -> list[str]:
    """Return the IP addresses of a service's pods in order; empty if it has none yet."""
    try:
        found = socket.getaddrinfo(service, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(info[4][0]) for info in found})
