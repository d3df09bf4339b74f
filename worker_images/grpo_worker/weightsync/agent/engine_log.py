"""Keeps the lines of the engine's server beside the agent's own, in the job's store.

The server itself may not write there. The first process of its container writes its lines to a file in the
pod, and is there after the server has died; so is the agent.
"""

import logging
import threading
import time
from pathlib import Path

from grpo_worker.common.shared_lines import LinesReader

log = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between two looks, by which times of lines may be late


class EngineLog:
    """Hands the lines in the file ``source`` to ``stored``, with the engine's role."""

    def __init__(self, source: Path, stored: logging.Handler) -> None:
        self._source, self._stored = source, stored
        self._reader = LinesReader(source)
        self._lock = threading.Lock()

    def start(self, pause: float = _PAUSE) -> None:
        """Start a thread that looks for lines every ``pause`` seconds, until it cannot read them."""

        def forward_all() -> None:
            while self.forward():
                time.sleep(pause)

        threading.Thread(target=forward_all, name="engine-log", daemon=True).start()

    def forward(self) -> bool:
        """Hand over the lines that are new; return False if they cannot be read."""
        with self._lock:
            try:
                lines = self._reader.read()
            except OSError as error:
                log.warning("the engine's lines in %s are kept no longer: %s", self._source, error)
                return False
            for line in lines:
                self._stored.handle(_record(line))
            return True


def _record(line: str) -> logging.LogRecord:
    level = {"levelno": logging.INFO, "levelname": "INFO"}  # the text has that of the server
    return logging.makeLogRecord(level | {"msg": line, "role": "engine"})
