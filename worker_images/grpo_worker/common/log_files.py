"""Log files of a job in its store: their names, their limits, and which of them are removed.

``logs/controller.TIME.log`` for each start of a controller, ``logs/trainer-RANK.attempt-N.log`` for each
rank of an attempt. Nothing can be appended to an object, so a job in an object store has none.
"""

import logging
import os
import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.stored_log import StoredLog

FOLDER = "logs"
# Of a file; there may be two of each, the second one named .log.1.
RANK_BYTES, CONTROLLER_BYTES = 256 << 10, 8 << 20
ATTEMPTS, CONTROLLERS = 4, 8  # whose files are kept
_OF_RANK = re.compile(r"trainer-\d+\.attempt-(\d+)\.log(?:\.1)?")
_OF_CONTROLLER = re.compile(r"controller\.(\d{8}T\d{6}Z)\.log(?:\.1)?")


def log_folder(store: StoreSpec, job: Path) -> Path | None:
    """Return the folder for the log files of a job, whose own folder is ``job``; None: it has no such."""
    return None if store.uri else job / FOLDER


def keep_controller_lines(folder: Path | None) -> None:
    """Write the lines of this controller to a file in ``folder``, too."""
    if folder is not None:
        name = f"controller.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.log"
        _keep(StoredLog(folder / name, CONTROLLER_BYTES, partial(remove_outdated, folder)))


def keep_rank_lines(folder: Path | None, rank: int, attempt: int) -> None:
    """Label the lines of this rank, and write them to a file in ``folder``, too."""
    LABELS.rank, LABELS.attempt = rank, attempt
    if folder is not None:
        tidy = partial(remove_outdated, folder) if rank == 0 else lambda: None
        _keep(StoredLog(folder / f"trainer-{rank}.attempt-{attempt}.log", RANK_BYTES, tidy))


def _keep(stored: StoredLog) -> None:
    logging.getLogger().addHandler(stored)


def remove_outdated(folder: Path) -> None:
    """Remove the files of old attempts and controllers. Raises OSError."""
    if folder.is_dir():
        for name in outdated(os.listdir(folder)):
            (folder / name).unlink(missing_ok=True)


def outdated(names: Iterable[str]) -> list[str]:
    """Return the files that are of none of the newest ``ATTEMPTS`` and ``CONTROLLERS``."""
    return [*_older(names, _OF_RANK, ATTEMPTS), *_older(names, _OF_CONTROLLER, CONTROLLERS)]


def _older(names: Iterable[str], pattern: re.Pattern[str], kept: int) -> list[str]:
    found = {name: match[1] for name in names if (match := pattern.fullmatch(name))}
    numbers = sorted(set(found.values()), key=lambda number: (len(number), number))  # 9, 10
    return [name for name, number in found.items() if number in numbers[:-kept]]
