"""TLS between the pods of a job, of a pool, and the operator (``scheduling.tls``).

The operator mounts a folder with the pod's certificate, its key and the certificates that are trusted.
Kubelet replaces its files when they are renewed, so each handshake uses what they contain then. A server is
known by the name of its job or pool, not by its address: pods come and go. Without the folder, it is HTTP.
"""

import logging
import os
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from grpo_operator.api.names import CERTIFICATE, GENERATE, PRIVATE_KEY, TRUSTED
from grpo_operator.api.urls import pod_url

log = logging.getLogger(__name__)
# Variables: the folder; the name in the certificate of the process's own job or pool; in a job's pods, the
# name of the shared pool that the job uses.
FOLDER, NAME, PAIR_NAME = "GRPO_TLS_DIR", "GRPO_TLS_NAME", "GRPO_TLS_PAIR_NAME"
Names = Callable[[], frozenset[str]]


def folder() -> Path | None:
    """Return the folder of the certificates; None if the pod has none."""
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


def url(host: str, port: int, path: str = "") -> str:
    """Return the URL of a pod's server."""
    return pod_url(host, port, path, tls=folder() is not None)


def own() -> ssl.SSLContext | bool:
    """Return what a client verifies pods of its own job or pool with; True, the libraries' default, if no TLS
    is configured.
    """
    return _client(_own_names)


def pair() -> ssl.SSLContext | bool:
    """Return what a client verifies the other side with: a job its engines, and engines their trainers.

    It accepts pods of its own job or pool, too: engines also read weights from one another.
    """
    return _client(lambda: _own_names() | _pair_names())


def for_urllib() -> ssl.SSLContext | None:
    """Return ``own`` for urllib, whose default is None."""
    verify = own()
    return None if isinstance(verify, bool) else verify


def server_context() -> ssl.SSLContext | None:
    """Return the context of a server; None if no TLS is configured."""
    found = folder()
    if found is None:
        return None
    return _Renewed(
        ssl.PROTOCOL_TLS_SERVER, partial(_serving, found), found / CERTIFICATE, found / PRIVATE_KEY
    )


def generate_headers() -> dict[str, str]:
    """Return the HTTP headers of a call to an engine's server that is no control call; empty without TLS."""
    found = folder()
    return {} if found is None else {"authorization": f"Bearer {(found / GENERATE).read_text().strip()}"}


def _own_names() -> frozenset[str]:
    return frozenset({os.environ[NAME]})


def _pair_names() -> frozenset[str]:
    """Return the name of a job's shared pool, or, in an agent of such a pool, of the job that it serves."""
    if PAIR_NAME in os.environ:
        return frozenset({os.environ[PAIR_NAME]})
    from grpo_worker.common.auth import served  # the first process of an engine does without its libraries

    writer = served()
    if writer is None:
        return frozenset()
    job, _, _ = writer.rpartition("-")  # names.writer
    _, _, domain = os.environ[NAME].partition(".")
    return frozenset({f"{job}.{domain}"})


def _client(names: Names) -> ssl.SSLContext | bool:
    found = folder()
    if found is None:
        return True
    return _Renewed(ssl.PROTOCOL_TLS_CLIENT, partial(_verifying, found, names), found / TRUSTED)


class _Renewed(ssl.SSLContext):
    """Context that passes each connection on to one which was made of the files as they are then.

    ``load``: makes that one. ``files``: those it reads; kubelet replaces all of them at once.
    """

    def __new__(cls, protocol: int, _load: Callable[[], ssl.SSLContext], *_files: Path) -> Self:
        return super().__new__(cls, protocol)

    def __init__(self, _protocol: int, load: Callable[[], ssl.SSLContext], *files: Path) -> None:
        self.check_hostname = False  # libraries would verify the host of the URL, which is an address
        self._load, self._files = load, files
        self._seen = self._status()
        self._inner = load()

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        return self._current().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self._current().wrap_bio(*arguments, **options)

    def _current(self) -> ssl.SSLContext:
        try:
            now = self._status()
            if now != self._seen:
                self._inner = self._load()
                self._seen = now
        except (OSError, ssl.SSLError) as error:  # one file is replaced, and the other one not yet
            log.warning("the certificates of this pod cannot be read, those before are used: %s", error)
        return self._inner

    def _status(self) -> list[tuple[int, int]]:
        return [(found.st_ino, found.st_mtime_ns) for found in (file.stat() for file in self._files)]


def _serving(of: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(of / CERTIFICATE, of / PRIVATE_KEY)
    return context


def _verifying(of: Path, names: Names) -> ssl.SSLContext:
    context = _Verifying(ssl.PROTOCOL_TLS_CLIENT)
    context.names = names
    context.load_verify_locations(of / TRUSTED)
    return context


class _Verifying(ssl.SSLContext):
    """Context that verifies the names of servers after the handshake; OpenSSL would verify one name only."""

    names: Names

    def __init__(self, _protocol: int) -> None:
        self.check_hostname = False
        self.minimum_version = ssl.TLSVersion.TLSv1_2
        self.sslsocket_class, self.sslobject_class = _Socket, _Object

    def verify(self, certificate: dict[str, Any] | None) -> None:
        """Raise SSLCertVerificationError if a verified certificate has none of the names."""
        alternatives = (certificate or {}).get("subjectAltName", ())
        have = {value.lower() for kind, value in alternatives if kind == "DNS"}
        wanted = self.names()
        if not have & wanted:
            raise ssl.SSLCertVerificationError(
                f"the server's certificate is for {', '.join(sorted(have)) or 'no name'}, "
                f"not for {' or '.join(sorted(wanted))}"
            )


class _Socket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        cast(_Verifying, self.context).verify(self.getpeercert())


class _Object(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        cast(_Verifying, self.context).verify(self.getpeercert())
