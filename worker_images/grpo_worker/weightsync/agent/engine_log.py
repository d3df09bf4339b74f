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


def keep_engine_lines(source: Path, stored: logging.Handler, pause: float = _PAUSE) -> None:
    """Start a thread that hands the lines in ``source`` to ``stored``, with the engine's role."""
    reader = LinesReader(source)

    def forward() -> None:
        while True:
            try:
                for line in reader.read():
                    stored.handle(_record(line))
            except OSError as error:
                log.warning("the engine's lines in %s are kept no longer: %s", source, error)
                return
            time.sleep(pause)

    threading.Thread(target=forward, name="engine-log", daemon=True).start()


def _record(line: str) -> logging.LogRecord:
    level = {"levelno": logging.INFO, "levelname": "INFO"}  # the text has that of the server
    return logging.makeLogRecord(level | {"msg": line, "role": "engine"})
