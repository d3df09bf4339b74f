"""Folder of a checkpoint in the store, and a draft of its small files in the pod.

Megatron-Core creates the folder and writes the small files in the call that begins or ends a checkpoint. It
gets the draft for them, so that a slow store delays no step; threads of the ranks do the rest.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from grpo_worker.checkpointing.store import PIECES, STATE, remove_remains, step_and_attempt
from grpo_worker.common.store_path import StorePath, file_sizes, remove_tree
from grpo_worker.megatron.host_sync.notes import leave, read
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN

if TYPE_CHECKING:
    from upath import UPath

_PIECE = 16 << 20  # bytes


class Draft:
    """Folder of this rank's pod for the small files of one checkpoint; those of rank 0 count."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="checkpoint-"))

    def publish(self, folder: StorePath) -> None:
        """Copy the files to the folder in the store."""
        for file in sorted(self.path.iterdir()):
            _copy(file, folder / file.name)

    def remove(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.path, ignore_errors=True)


def _copy(file: Path, target: StorePath) -> None:
    with file.open("rb") as source, target.open("wb") as copy:
        while piece := source.read(_PIECE):
            copy.write(piece)
            BACKGROUND.add(WRITTEN, len(piece))
        if isinstance(target, Path):
            copy.flush()
            os.fsync(copy.fileno())


def small_files(folder: "UPath") -> Draft:
    """Return a draft with copies of the small files of a checkpoint in an object store."""
    draft = Draft()
    for name in file_sizes(folder):
        if not name.endswith((STATE, *PIECES)):
            (draft.path / name).write_bytes((folder / name).read_bytes())
    return draft


def await_folder(folder: StorePath, key: str) -> None:
    """Create a checkpoint's empty folder on rank 0; the other ranks wait until it exists.

    ``key``: names this checkpoint, the same on all ranks. Raises OSError on every rank if it cannot be
    created.
    """
    if dist.get_rank() == 0:
        leave(key, _created(folder))
    if problem := read(key):
        raise OSError(*json.loads(problem))


def _created(folder: StorePath) -> str:
    """Create the folder and return why that is not possible, as JSON of number and text, or ""."""
    try:
        remove_tree(folder)  # left by an earlier save of this attempt
        if isinstance(folder, Path):
            folder.mkdir(parents=True)
        remove_remains(folder.parent, step_and_attempt(folder)[1])
    except OSError as error:
        text = f"{folder} cannot be created ({error.strerror or error}): check checkpoint.store"
        return json.dumps([error.errno or 0, text])
    return ""
