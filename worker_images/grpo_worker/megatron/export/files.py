"""Safetensors files of limited size, and the index that says which tensor is in which."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_worker.model_files.names import INDEX

FILE_BYTES = 2 * 2**30


@dataclass(slots=True)
class Written:
    """What one rank wrote. ``places``: tensor -> (file, bytes); ``failure``: why it stopped."""

    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    failure: str | None = None


class FileWriter:
    """The files of one rank, at most one of them in memory. A file is written when it is full.

    A failure is noted in ``written``, not raised: other ranks still gather tensors with this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.written = Written()
        self._folder, self._rank = folder, rank
        self._pending: dict[str, torch.Tensor] = {}
        self._files = 0

    @property
    def failed(self) -> bool:
        return self.written.failure is not None

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put tensors on the host into one file, this or the next."""
        if self._pending and _size(self._pending.values()) + _size(tensors.values()) > FILE_BYTES:
            self.flush()
        if not self.failed:
            self._pending |= tensors

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending or self.failed:
            return
        name = f"model-{self._rank:05d}-{self._files:05d}.safetensors"
        try:
            save_file(self._pending, self._folder / name, metadata={"format": "pt"})
        except Exception as error:  # safetensors has its own type for a full disk
            self.written.failure = (
                f"rank {self._rank} cannot write {self._folder / name} ({error}): "
                "free or add space, and check that the pods may write there"
            )
        else:
            self._files += 1
            self.written.places |= {key: (name, value.nbytes) for key, value in self._pending.items()}
        self._pending.clear()


def write_index(folder: Path, places: dict[str, tuple[str, int]]) -> None:
    """Write the index of all ranks' files. ``places``: tensor -> (file, bytes)."""
    index = {
        "metadata": {"total_size": sum(size for _, size in places.values())},
        "weight_map": {name: file for name, (file, _) in sorted(places.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
