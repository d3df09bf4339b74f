"""Places of exports: directories that are renamed when they are complete, or objects of a bucket."""

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save, save_file

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.exports import CONFIG
from grpo_worker.common.object_stream import PART, object_stream
from grpo_worker.common.store_path import StorePath, children, patiently, remove_file, remove_tree
from grpo_worker.profiling.counted_file import growing
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN

if TYPE_CHECKING:
    from upath import UPath

_METADATA = {"format": "pt"}


class ExportPlace(ABC):
    """Place of one export of an attempt. All ranks write files; rank 0 calls the other methods."""

    @abstractmethod
    def begin(self, write_companions: Callable[[Path], None]) -> None:
        """Prepare the place, with the small files. ``write_companions``: writes these to a folder."""

    @abstractmethod
    def file_name(self, rank: int, number: int) -> str:
        """Return the name of a rank's safetensors file."""

    @abstractmethod
    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a safetensors file."""

    @abstractmethod
    def complete(self, texts: dict[str, str]) -> None:
        """Write the last files, name -> content, config.json last, and make the export appear.

        Raises SupersededError if a newer attempt was claimed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written."""


def place_of(target: StorePath, attempt: int) -> ExportPlace:
    """Return the place of the export ``target`` of an attempt, in the folder ``export`` of a job."""
    return _Directory(target, attempt) if isinstance(target, Path) else _Objects(target, attempt)


class _Directory(ExportPlace):
    """Directory in a file system. It has another name until it is complete."""

    def __init__(self, target: Path, attempt: int) -> None:
        self._target, self._attempt = target, attempt
        self._building = target.with_name(f"{target.name}.attempt-{attempt}.incomplete")

    def begin(self, write_companions: Callable[[Path], None]) -> None:
        for left in self._target.parent.glob(f"{self._target.name}.*incomplete"):
            if _attempt_of(left) <= self._attempt:
                shutil.rmtree(left, ignore_errors=True)
        self._building.mkdir(parents=True)
        write_companions(self._building)

    def file_name(self, rank: int, number: int) -> str:
        return f"model-{rank:05d}-{number:05d}.safetensors"

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        with growing(self._building / name):
            save_file(tensors, self._building / name, metadata=_METADATA)

    def complete(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (self._building / name).write_text(text)
        attempts.check(self._target.parent.parent, self._attempt)
        shutil.rmtree(self._target, ignore_errors=True)
        self._building.rename(self._target)

    def discard(self) -> None:
        shutil.rmtree(self._building, ignore_errors=True)  # incomplete files would fill the store


class _Objects(ExportPlace):
    """Objects of a bucket, which cannot be renamed. The export is complete when config.json is there.

    Weights of two attempts never have the same name, so that the index never names those of another one.
    """

    def __init__(self, target: "UPath", attempt: int) -> None:
        self._target, self._attempt = target, attempt
        self._prefix = f"model-{attempt}-"

    def begin(self, write_companions: Callable[[Path], None]) -> None:
        patiently(lambda: remove_file(self._target / CONFIG), f"beginning {self._target}")
        with TemporaryDirectory() as folder:
            write_companions(Path(folder))
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            for file in files:
                self._put(file.relative_to(folder).as_posix(), file.read_bytes())

    def file_name(self, rank: int, number: int) -> str:
        return f"{self._prefix}{rank:05d}-{number:05d}.safetensors"

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        data = save(tensors, metadata=_METADATA)
        patiently(lambda: self._upload(name, data), f"writing {self._target / name}")

    def complete(self, texts: dict[str, str]) -> None:
        attempts.check(self._target.parent.parent, self._attempt)
        for name in children(self._target):
            if name.startswith("model-") and not name.startswith(self._prefix):
                remove_file(self._target / name)  # of an attempt that ended before its export was complete
        for name, text in texts.items():
            self._put(name, text.encode())

    def discard(self) -> None:
        remove_tree(self._target)

    def _put(self, name: str, data: bytes) -> None:
        file = self._target / name
        patiently(lambda: file.fs.pipe_file(file.path, data), f"writing {file}")

    def _upload(self, name: str, data: bytes) -> None:
        with object_stream(self._target / name) as stream:
            for start in range(0, len(data), PART):
                BACKGROUND.add(WRITTEN, stream.write(data[start : start + PART]))


def _attempt_of(building: Path) -> int:
    """Return the attempt whose ranks write an export; 0: that of an earlier version."""
    found = re.search(r"\.attempt-(\d+)\.incomplete$", building.name)
    return int(found[1]) if found else 0
