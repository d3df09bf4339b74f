"""Entry point of the pod that removes the folder of a deleted job from its store.

Usage: ``python3 -m grpo_worker.checkpointing.removal FOLDER STORE``. ``FOLDER``: of the job, where this pod
has the store. ``STORE``: ``checkpoint.store`` of its spec as JSON. The process may be killed at any moment
and run again.
"""

import errno
import json
import logging
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing.store import MARKER
from grpo_worker.common.errors import one_line
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.store_path import JobFolder, end_uploads

if TYPE_CHECKING:
    from upath import UPath

log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?-[0-9a-f]{8}")  # as names.job_store makes it
_DELETED = ".deleted-"  # prefix of a folder that is being removed, which checkpoint.resumeFrom cannot name


def main(arguments: list[str]) -> None:
    """Remove the folder, or exit with a message about what is in the way."""
    log_as("store-removal")
    folder, spec = Path(arguments[0]), StoreSpec.of_any_release(json.loads(arguments[1]))
    try:
        remove(spec, folder)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"{spec.label}: {folder.name} is not removed: {one_line(error)}")
    log.info("%s: %s is removed", spec.label, folder.name)


def remove(spec: StoreSpec, folder: Path) -> None:
    """Remove the folder of one job with all that is in it; it need not exist.

    Raises OSError if something is left, and ValueError if it is no job's folder.
    """
    if not _NAME.fullmatch(folder.name):
        raise ValueError(f"{folder.name!r} is not the name of a job's folder: NAMESPACE-NAME-UID")
    place = JobFolder.of(spec, folder).store
    if isinstance(place, Path):
        _remove_files(folder.parent, folder.name)
    else:
        _remove_objects(place)


def _remove_files(store: Path, name: str) -> None:
    """Rename the folder first: nobody may read a checkpoint in it when a part of it is gone."""
    root = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deleted = f"{_DELETED}{name}"
        _remove_tree(root, deleted)  # what an earlier run has left
        if _is_folder(root, name):
            os.rename(name, deleted, src_dir_fd=root, dst_dir_fd=root)
            _remove_tree(root, deleted)
    finally:
        os.close(root)


def _remove_tree(root: int, name: str) -> None:
    """Remove a folder, which need not exist. Symbolic links in it are removed, not followed."""
    if _is_folder(root, name):
        shutil.rmtree(name, dir_fd=root)


def _is_folder(root: int, name: str) -> bool:
    """Return whether there is such a folder. Raises ValueError for anything else of that name."""
    try:
        kind = os.stat(name, dir_fd=root, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(kind):
        raise ValueError(f"{name} is a symbolic link or a file, not the job's folder: remove it yourself")
    return True


def _remove_objects(folder: "UPath") -> None:
    """Remove the markers first: a checkpoint without its marker does not exist."""
    end_uploads(folder)
    files, path = folder.fs, folder.path
    try:
        if markers := [name for name in files.find(path) if name.endswith(f"/{MARKER}")]:
            files.rm(markers)
        files.rm(path, recursive=True)
    except FileNotFoundError:
        return
    if left := files.find(path):
        raise OSError(errno.ENOTEMPTY, f"{len(left)} objects are left, such as {left[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
