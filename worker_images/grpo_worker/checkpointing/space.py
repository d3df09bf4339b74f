"""Space that checkpoints take in the store, and what the store has left for the next one."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_worker.checkpointing.best import best_step
from grpo_worker.checkpointing.store import MARKER, WEIGHTS, complete, prune
from grpo_worker.common.store_path import StorePath, file_sizes

_SPARE = 1.02  # of the bytes of a checkpoint: records and samples are written meanwhile

_OPTIMIZER_BYTES = 12  # of a parameter: main weight and two moments in fp32


@dataclass(frozen=True, slots=True)
class Space:
    """A store's own account of its bytes: ``total`` and ``free``. ``kept``: what checkpoints take of it."""

    total: int
    free: int
    kept: int = 0

    def missing(self, needed: int) -> int:
        """Return how many bytes are missing for ``needed`` more; 0 if they fit, or if nobody knows.

        Network file systems that do not know their size report none at all, or one that cannot be: less than
        they keep. What they say of free space means nothing then.
        """
        if self.total <= 0 or not 0 <= self.free <= self.total or self.total < self.kept:
            return 0
        return max(0, int(needed * _SPARE) - self.free)


def checkpoint_bytes(path: StorePath) -> int:
    """Return the bytes of a complete checkpoint, with its copy of the weight version.

    Raises OSError, and ValueError or KeyError for a marker that cannot be read.
    """
    files: dict[str, int] = json.loads((path / MARKER).read_text())["files"]
    return sum(files.values()) + weights_bytes(path)


def weights_bytes(path: StorePath) -> int:
    """Return the bytes of a checkpoint's copy of the weight version, which only the newest one has."""
    return sum(file_sizes(path / WEIGHTS).values())


def estimated_bytes(parameters: int, weight: int, *, critic: bool, reference: bool, copy: bool) -> int:
    """Return about how many bytes a checkpoint takes of which none exists yet.

    ``parameters``: of the policy; a critic has as many. ``weight``: bytes of a parameter in the model.
    ``reference``: it contains the weights of the reference, ``copy``: of a weight version for engines.
    """
    trained = (weight + _OPTIMIZER_BYTES) * (1 + critic)
    return parameters * (trained + weight * (reference + copy))


def space_of(root: StorePath) -> Space:
    """Ask the store how much space it has. Raises OSError. An object store does not know.

    ``root``: folder of checkpoints in it, which need not exist before the first one.
    """
    if not isinstance(root, Path):
        return Space(0, 0)
    usage = shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists()))
    kept = sum(map(checkpoint_bytes, complete(root).values()))
    return Space(usage.total, usage.free, kept)


def make_room(root: StorePath, keep: int, attempt: int, missing: int) -> bool:
    """Remove the checkpoints that the next complete one removes anyway, if their bytes suffice.

    At least one complete checkpoint stays, so nothing is removed if ``keep`` is 1. Return whether any was
    removed. Call it while no checkpoint is being written. Raises SupersededError if a newer attempt than
    ``attempt`` was claimed.
    """
    found, best = complete(root), best_step(root)
    older = list(found.items())[: max(0, len(found) - max(1, keep - 1))]
    surplus = [path for step, path in older if step != best]
    if not surplus or sum(map(_own_bytes, surplus)) < missing:
        return False
    prune(root, max(1, keep - 1), attempt)
    return True


def _own_bytes(path: StorePath) -> int:
    """Return the bytes that the removal of a checkpoint frees: none of files that another job has too."""
    files: dict[str, int] = json.loads((path / MARKER).read_text())["files"]
    found = (Path(str(path), name).lstat() for name in files)  # only file systems report that they are full
    return sum(file.st_size for file in found if file.st_nlink == 1) + weights_bytes(path)
