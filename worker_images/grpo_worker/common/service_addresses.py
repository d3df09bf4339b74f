"""Addresses of the pods behind a headless service."""

import logging
import socket

log = logging.getLogger(__name__)
_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


class ServiceAddresses:
    """Finds the pods of a service; while DNS does not answer, they are those of its last answer."""

    def __init__(self, service: str, port: int) -> None:
        self._service, self._port = service, port
        self._last: list[str] = []
        self._away = False

    def __call__(self) -> list[str]:
        """Return the IP addresses in order; empty if the service has no pods yet."""
        try:
            self._last = _looked_up(self._service, self._port)
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                self._last = []
            else:
                self._note(str(error))
                return self._last
        self._note("")
        return self._last

    def _note(self, problem: str) -> None:
        if problem and not self._away:
            log.warning("%s cannot be looked up: %s; its last addresses are used", self._service, problem)
        self._away = bool(problem)


def _looked_up(service: str, port: int) -> list[str]:
    """Return the addresses that DNS has for a service. Raises socket.gaierror.

    A pod with addresses of both families counts once: IPv6 ones are returned where there are no others.
    """
    by_family: dict[int, set[str]] = {}
    for family, *_, address in socket.getaddrinfo(service, port, socket.AF_UNSPEC, socket.SOCK_STREAM):
        by_family.setdefault(family, set()).add(str(address[0]))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
