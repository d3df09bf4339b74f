"""Paths in a store, which is a file system or an object store, and what both need another call for.

A path in a file system is a ``Path``; one in an object store is a ``UPath`` of universal_pathlib, through
fsspec. Objects have no folders of their own, cannot be appended to, and appear as a whole or not at all.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from grpo_operator.api.names import in_bucket
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.store_problems import answers_not

if TYPE_CHECKING:
    from upath import UPath

log = logging.getLogger(__name__)
StorePath: TypeAlias = "Path | UPath"
Place = TypeVar("Place", bound="Path | UPath")
_T = TypeVar("_T")
_LONGEST_PAUSE = 60.0  # seconds between two tries


def store_path(store: StoreSpec, path: str) -> StorePath:
    """Return a path in a store. ``path``: absolute, or a URI below the store's."""
    if store.uri is None:
        return Path(path)
    from upath import UPath

    remote: UPath = UPath(path, **_options(store, path))
    return remote


def _options(store: StoreSpec, path: str) -> dict[str, Any]:
    try:
        if path.startswith("s3://"):
            from grpo_worker.common.s3 import options
        else:
            from grpo_worker.common.google_storage import options
    except ImportError:
        return {}  # whoever waits for the store says which driver the image lacks
    return options(store)


def elsewhere(path: Place, other: str) -> Place:
    """Return another path in the store of ``path``, or on its server."""
    if isinstance(path, Path):
        return cast(Place, Path(other))
    from upath import UPath

    return cast(Place, UPath(other, **path.storage_options))


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Folder of a job. ``store``: in its store, what outlives the pods. ``disk``: in a pod.

    Both are the same unless the store is an object store. Then ``disk`` is lost with the pod: it has logs,
    of which the store gets pieces, and files that libraries write.
    """

    store: StorePath
    disk: Path

    @classmethod
    def of(cls, store: StoreSpec, disk: Path) -> "JobFolder":
        """Return the folder of a job that pods have at ``disk``."""
        uri = store.uri
        return cls(store_path(store, in_bucket(uri, str(disk))) if uri else disk, disk)

    @property
    def pieces(self) -> "StorePath | None":
        """Return where the logs are kept in pieces; None if they are kept as they are."""
        return None if self.store == self.disk else self.store


def has_file(path: StorePath) -> bool:
    """Return whether there is such a file. Raises OSError when the store does not answer."""
    if isinstance(path, Path):
        return path.is_file()
    try:
        return str(path.fs.info(path.path)["type"]) == "file"
    except FileNotFoundError:
        return False


def remove_file(path: StorePath) -> None:
    """Remove a file, which need not exist."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    elif has_file(path):
        path.fs.rm_file(path.path)


def create(path: "UPath", text: str) -> None:
    """Create an object, unless it exists; of several that try, one succeeds."""
    try:
        path.fs.pipe_file(path.path, text.encode(), mode="create")
    except FileExistsError:
        log.info("%s exists already", path)


def children(folder: StorePath) -> list[str]:
    """Return the names of what is in a folder; none if there is no such folder."""
    try:
        if isinstance(folder, Path):
            return os.listdir(folder)
        return [str(name).rstrip("/").rpartition("/")[2] for name in folder.fs.ls(folder.path, detail=False)]
    except FileNotFoundError:
        return []


def file_sizes(folder: StorePath) -> dict[str, int]:
    """Return the bytes of the files in a folder, by name, ascending; none if there is no such folder."""
    if isinstance(folder, Path):
        files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        return {file.name: file.stat().st_size for file in sorted(files)}
    try:
        found = folder.fs.ls(folder.path, detail=True)
    except FileNotFoundError:
        return {}
    sizes = {info["name"].rpartition("/")[2]: int(info["size"]) for info in found if info["type"] == "file"}
    return dict(sorted(sizes.items()))


def rename(file: StorePath, target: StorePath) -> None:
    """Give a file another name in the same store. In an object store it may have both for a moment."""
    if isinstance(file, Path):
        file.rename(str(target))
    else:
        file.fs.mv(file.path, str(target))


def remove_tree(folder: StorePath) -> None:
    """Remove a folder with all that is in it, as far as that is possible; it need not exist."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        end_uploads(folder)
        folder.fs.rm(folder.path, recursive=True)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s is not removed: %s", folder, error)


def uploads_below(folder: StorePath) -> list[str]:
    """Return the names of the objects below a folder whose uploads were begun and not ended."""
    return [] if isinstance(folder, Path) else [key for key, _ in _uploads(folder)]


def end_uploads(folder: "UPath") -> None:
    """Discard the uploads below a folder that were not ended: nobody sees their parts, which cost space."""
    for key, number in _uploads(folder):
        folder.fs.abort_mpu(folder.fs.split_path(folder.path)[0], key, number)


def _uploads(folder: "UPath") -> list[tuple[str, str]]:
    """Return the keys and ids of uploads that were not ended; none if the store does not list them."""
    try:
        return list(folder.fs.uploads(folder.path)) if hasattr(folder.fs, "uploads") else []
    except OSError as error:
        if answers_not(error):
            raise
        log.warning("uploads that were not ended stay in %s, which does not list them: %s", folder, error)
        return []


def patiently(
    work: Callable[[], _T],
    what: str,
    sleep: Callable[[float], None] = time.sleep,
    report: Callable[[str], None] = log.warning,
) -> _T:
    """Do some work, again and again while the store does not answer. Raises other errors.

    ``what``: the work, in messages to ``report``. Whoever waits for it is watched by the progress that it
    makes.
    """
    pause = 1.0
    while True:
        try:
            return work()
        except OSError as error:
            if not answers_not(error):
                raise
            report(f"{what}: the store does not answer, next try in {pause:.0f} s: {error}")
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
