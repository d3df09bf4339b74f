"""Log files of a job in its store: their names, their limits, and which of them are removed.

``logs/controller.TIME.log`` for each start of a controller, ``logs/trainer-RANK.attempt-N.log`` for each
rank of an attempt, ``logs/engine.TIME.POD.log`` and ``logs/trainer-agent.TIME.POD.log`` for each start of an
agent. Nothing can be appended to an object, so a job in an object store has none.
"""

import logging
import os
import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from grpo_operator.api.names import LOGS
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.stored_log import StoredLog

# Of a file; there may be two of each, the second one named .log.1.
RANK_BYTES, AGENT_BYTES, CONTROLLER_BYTES = 256 << 10, 512 << 10, 8 << 20
ATTEMPTS, CONTROLLERS, AGENTS = 4, 8, 1024  # whose files are kept; so many agents of each kind
AGENT_PAUSE = 60.0  # seconds between two writes: engines, of which there may be hundreds, always have lines
_KEPT = {
    re.compile(r"trainer-\d+\.attempt-(\d+)\.log(?:\.1)?"): ATTEMPTS,
    re.compile(r"controller\.(\d{8}T\d{6}Z)\.log(?:\.1)?"): CONTROLLERS,
    re.compile(r"engine\.(\d{8}T\d{6}Z\..+?)\.log(?:\.1)?"): AGENTS,
    re.compile(r"trainer-agent\.(\d{8}T\d{6}Z\..+?)\.log(?:\.1)?"): AGENTS,
}


def log_folder(store: StoreSpec, job: Path) -> Path | None:
    """Return the folder for the log files of a job, whose own folder is ``job``; None: it has no such."""
    return None if store.uri else job / LOGS


def keep_controller_lines(folder: Path | None) -> None:
    """Write the lines of this controller to a file in ``folder``, too."""
    if folder is not None:
        name = f"controller.{_now()}.log"
        _keep(StoredLog(folder / name, CONTROLLER_BYTES, partial(remove_outdated, folder)))


def keep_agent_lines(folder: Path | None, kind: str, pod: str) -> StoredLog | None:
    """Write the lines of this agent to a file in ``folder``, too, and return what writes them.

    ``kind``: ``engine``, whose file gets the engine's lines besides and whose lines name the engine, or
    ``trainer-agent``.
    """
    if kind == "engine":
        LABELS.engine = pod
    if folder is None:
        return None
    file = folder / f"{kind}.{_now()}.{pod}.log"
    stored = StoredLog(file, AGENT_BYTES, partial(remove_outdated, folder), AGENT_PAUSE)
    _keep(stored)
    return stored


def keep_rank_lines(folder: Path | None, rank: int, attempt: int) -> None:
    """Label the lines of this rank, and write them to a file in ``folder``, too."""
    LABELS.rank, LABELS.attempt = rank, attempt
    if folder is not None:
        tidy = partial(remove_outdated, folder) if rank == 0 else lambda: None
        _keep(StoredLog(folder / f"trainer-{rank}.attempt-{attempt}.log", RANK_BYTES, tidy))


def _now() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _keep(stored: StoredLog) -> None:
    logging.getLogger().addHandler(stored)


def remove_outdated(folder: Path) -> None:
    """Remove the files of old attempts, controllers and agents. Raises OSError."""
    if folder.is_dir():
        for name in outdated(os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)


def outdated(names: Iterable[str]) -> list[str]:
    """Return the files that are of none of the newest ``ATTEMPTS``, ``CONTROLLERS`` and ``AGENTS``."""
    return [name for pattern, kept in _KEPT.items() for name in _older(names, pattern, kept)]


def _older(names: Iterable[str], pattern: re.Pattern[str], kept: int) -> list[str]:
    found = {name: match[1] for name in names if (match := pattern.fullmatch(name))}
    old = set(sorted(set(found.values()), key=lambda start: start.zfill(10))[:-kept])  # 9, 10
    return [name for name, start in found.items() if start in old]
