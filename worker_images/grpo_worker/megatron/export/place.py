"""Places of exports: directories that are renamed when they are complete, or objects of a bucket."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save, save_file

from grpo_worker.checkpointing.exports import CONFIG
from grpo_worker.common.object_stream import PART, object_stream
from grpo_worker.common.store_path import StorePath, children, has_file, patiently, remove_file, remove_tree
from grpo_worker.megatron.export.owner import ExportOwner
from grpo_worker.profiling.counted_file import growing
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN

if TYPE_CHECKING:
    from upath import UPath

_METADATA = {"format": "pt"}
_READABLE = 0o644  # as the other files of the directory
INCOMPLETE = ".incomplete"  # ends the name of a directory until it is complete


class ExportPlace(ABC):
    """Place of one export. If ranks write it, all write files, and rank 0 calls the other methods."""

    @abstractmethod
    def begin(self, write_companions: Callable[[Path], None]) -> None:
        """Prepare the place, with the small files. ``write_companions``: writes these to a folder.

        Raises FileExistsError if there is an export that the owner may not replace.
        """

    @abstractmethod
    def file_name(self, rank: int, number: int) -> str:
        """Return the name of a rank's safetensors file."""

    @abstractmethod
    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a safetensors file."""

    @abstractmethod
    def complete(self, texts: dict[str, str]) -> None:
        """Write the last files, name -> content, config.json last, and make the export appear.

        Raises SupersededError or FileExistsError if the owner may not complete it any more.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written."""


def place_of(target: StorePath, owner: ExportOwner) -> ExportPlace:
    """Return the place of the export ``target``, in the folder ``export`` of a job."""
    return _Directory(target, owner) if isinstance(target, Path) else _Objects(target, owner)


class _Directory(ExportPlace):
    """Directory in a file system. It has another name until it is complete."""

    def __init__(self, target: Path, owner: ExportOwner) -> None:
        self._target, self._owner = target, owner
        self._building = target.with_name(f"{target.name}.{owner.name}{INCOMPLETE}")

    def begin(self, write_companions: Callable[[Path], None]) -> None:
        self._owner.check_begin(self._target)
        for left in self._target.parent.glob(f"{self._target.name}.*incomplete"):
            if self._owner.outlives(left.name):
                shutil.rmtree(left, ignore_errors=True)
        self._building.mkdir(parents=True)
        write_companions(self._building)

    def file_name(self, rank: int, number: int) -> str:
        return f"model-{rank:05d}-{number:05d}.safetensors"

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        with growing(self._building / name):
            save_file(tensors, self._building / name, metadata=_METADATA)
        (self._building / name).chmod(_READABLE)  # safetensors lets nobody else read it

    def complete(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (self._building / name).write_text(text)
        self._owner.check_complete(self._target)
        if self._owner.replaces:
            shutil.rmtree(self._target, ignore_errors=True)
        self._building.rename(self._target)

    def discard(self) -> None:
        shutil.rmtree(self._building, ignore_errors=True)  # incomplete files would fill the store


class _Objects(ExportPlace):
    """Objects of a bucket, which cannot be renamed. The export is complete when config.json is there.

    Weights of two owners never have the same name, so that the index never names those of another one.
    """

    def __init__(self, target: "UPath", owner: ExportOwner) -> None:
        self._target, self._owner = target, owner
        self._prefix = f"model-{owner.key}-"

    def begin(self, write_companions: Callable[[Path], None]) -> None:
        patiently(self._make_room, f"beginning {self._target}")
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
        self._owner.check_complete(self._target)
        for name in children(self._target):
            if name.startswith("model-") and not name.startswith(self._prefix):
                remove_file(self._target / name)  # of an owner that ended before its export was complete
        for name, text in texts.items():
            self._put(name, text.encode())

    def discard(self) -> None:
        if self._owner.replaces or not has_file(self._target / CONFIG):
            remove_tree(self._target)
            return
        for name in children(self._target):
            if name.startswith(self._prefix):
                remove_file(self._target / name)

    def _make_room(self) -> None:
        self._owner.check_begin(self._target)
        if self._owner.replaces:
            remove_file(self._target / CONFIG)
        else:
            remove_tree(self._target)  # left by an owner that did not complete it

    def _put(self, name: str, data: bytes) -> None:
        file = self._target / name
        patiently(lambda: file.fs.pipe_file(file.path, data), f"writing {file}")

    def _upload(self, name: str, data: bytes) -> None:
        with object_stream(self._target / name) as stream:
            for start in range(0, len(data), PART):
                BACKGROUND.add(WRITTEN, stream.write(data[start : start + PART]))
