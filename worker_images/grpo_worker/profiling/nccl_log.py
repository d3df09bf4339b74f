"""NCCL's log while the process groups form, which names the transport that it chose."""

import ctypes
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from grpo_worker.profiling.nccl_transport import Transport, transport_of

log = logging.getLogger(__name__)
_WARNINGS = 8  # of NCCL, that are logged after a failure
_FILE, _LEVEL, _SUBSYSTEM = "NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"


class NcclLog:
    """The log of this process, from ``with`` to its end: NCCL writes a line for each later connection too.

    After a failure NCCL's last warnings go to this process's log. NCCL logs nothing without ``wanted``, nor
    if the user has asked for a log: that one is theirs.
    """

    def __init__(self, wanted: bool = True) -> None:
        theirs = {_FILE, _LEVEL, _SUBSYSTEM} & os.environ.keys()
        path = Path(tempfile.gettempdir()) / f"nccl-{os.getpid()}.log"
        self._path = path if wanted and not theirs else None

    def __enter__(self) -> Self:
        if self._path:
            os.environ |= {_FILE: str(self._path), _LEVEL: "INFO", _SUBSYSTEM: "INIT"}
        return self

    def transport(self) -> Transport:
        """Return the transport that NCCL has chosen so far, as far as it is known."""
        if self._path is None:
            return Transport()
        return transport_of(_lines(self._path))

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._path is None:
            return
        if failure is not None:
            for line in [line for line in _lines(self._path) if "NCCL WARN" in line][-_WARNINGS:]:
                log.warning("%s", line.rstrip())
        for name in (_FILE, _LEVEL, _SUBSYSTEM):
            os.environ.pop(name, None)
        _read_environment()
        self._path.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log; none if NCCL has not written it."""
    try:
        with path.open(errors="replace") as lines:
            yield from lines
    except OSError:
        return


def _read_environment() -> None:
    """Let NCCL read its environment a second time, and thus close its log.

    The function is exported but announced to be removed. Without it NCCL writes on to the deleted file: some
    lines for each new connection, and nothing else.
    """
    try:
        ctypes.CDLL("libnccl.so.2").ncclResetDebugInit()
    except (OSError, AttributeError):
        return
