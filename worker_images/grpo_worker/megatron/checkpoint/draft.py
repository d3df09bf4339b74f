"""Folder of a checkpoint in the store, and a draft of its small files in the pod.

Megatron-Core creates the folder and writes the small files in the call that begins or ends a checkpoint. It
gets the draft for them, so that a slow store delays no step; threads of the ranks do the rest.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from grpo_worker.checkpointing.store import remove_remains, step_and_attempt
from grpo_worker.megatron.host_sync.notes import leave, read
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN

_PIECE = 16 << 20  # bytes


class Draft:
    """Folder of this rank's pod for the small files of one checkpoint; those of rank 0 count."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="checkpoint-"))

    def publish(self, folder: Path) -> None:
        """Move the files to the folder in the store."""
        for file in sorted(self.path.iterdir()):
            _copy(file, folder / file.name)
        self.remove()

    def remove(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.path, ignore_errors=True)


def _copy(file: Path, target: Path) -> None:
    with file.open("rb") as source, target.open("wb") as copy:
        while piece := source.read(_PIECE):
            copy.write(piece)
            BACKGROUND.add(WRITTEN, len(piece))
        copy.flush()
        os.fsync(copy.fileno())


def await_folder(folder: Path, key: str) -> None:
    """Create a checkpoint's empty folder on rank 0; the other ranks wait until it exists.

    ``key``: names this checkpoint, the same on all ranks. Raises OSError on every rank if it cannot be
    created.
    """
    if dist.get_rank() == 0:
        leave(key, _created(folder))
    if problem := read(key):
        raise OSError(*json.loads(problem))


def _created(folder: Path) -> str:
    """Create the folder and return why that is not possible, as JSON of number and text, or ""."""
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier save of this attempt
        folder.mkdir(parents=True)
        remove_remains(folder.parent, step_and_attempt(folder)[1])
    except OSError as error:
        text = f"{folder} cannot be created ({error.strerror or error}): check checkpoint.store"
        return json.dumps([error.errno or 0, text])
    return ""
