"""Safetensors files of limited size, and the index of their tensors."""

import json
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from grpo_operator.api.v1alpha1.checkpoint import EXPORT_FILE_BYTES
from grpo_worker.common.store_problems import errno_of
from grpo_worker.megatron.export.config import Quantization
from grpo_worker.megatron.export.place import ExportPlace
from grpo_worker.profiling.background import join
from grpo_worker.quantization.fp8 import is_quantised, quantise

FILE_BYTES = EXPORT_FILE_BYTES


@dataclass(slots=True)
class WriteReport:
    """Files that one rank wrote.

    ``tensors``: tensor -> (file, bytes). ``failure``: why it stopped; ``errno``: the system's number for it.
    """

    tensors: dict[str, tuple[str, int]] = field(default_factory=dict)
    failure: str | None = None
    errno: int = 0

    def to_json(self) -> str:
        """Return the report as a note for another rank."""
        return json.dumps([self.tensors, self.failure, self.errno])

    @classmethod
    def from_json(cls, text: str) -> "WriteReport":
        """Return the report of another rank."""
        tensors, failure, number = json.loads(text)
        return cls({name: (file, size) for name, (file, size) in tensors.items()}, failure, number)


def stored(name: str, tensor: torch.Tensor, quantization: Quantization) -> dict[str, torch.Tensor]:
    """Return what files store for a tensor, on the host: itself, or e4m3 values and their scales."""
    if quantization == "none" or not is_quantised(name):
        return {name: tensor.cpu().contiguous()}
    values, scale = quantise(tensor)
    return {name: values.cpu(), f"{name}_scale_inv": scale.cpu()}


class FileWriter:
    """Writer of one rank's files in a thread; a file is written when it is full.

    A failure is recorded in ``report``, not raised, because other ranks still gather tensors with this one.
    """

    def __init__(self, place: ExportPlace, rank: int, thread: Executor, beside: bool) -> None:
        """``beside``: all files may wait in memory; else one is written before the next one is filled."""
        self.report = WriteReport()
        self._place, self._rank = place, rank
        self._thread, self._beside = thread, beside
        self._pending: dict[str, torch.Tensor] = {}
        self._files = 0

    @property
    def failed(self) -> bool:
        """True if an earlier write failed."""
        return self.report.failure is not None

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add tensors, which must be on the host, to the current file or, if it is full, to the next."""
        if self._pending and _size(self._pending.values()) + _size(tensors.values()) > FILE_BYTES:
            self.flush()
        if not self.failed:
            self._pending |= tensors

    def flush(self) -> None:
        """Hand the pending tensors over to the thread, which writes them to a file."""
        if not self._pending or self.failed:
            return
        name = self._place.file_name(self._rank, self._files)
        written = self._thread.submit(self._write, name, self._pending)
        self._files += 1
        self._pending = {}
        if not self._beside:
            join(written)

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.failed:
            return
        try:
            self._place.write(name, tensors)
        except Exception as error:  # noqa: BLE001 - safetensors has its own type for a full disk
            self.report.errno = errno_of(error)
            self.report.failure = (
                f"cannot write {name} ({error}): free or add space, and check that the pods may write there"
            )
        else:
            self.report.tensors |= {key: (name, value.nbytes) for key, value in tensors.items()}


def index_of(tensors: dict[str, tuple[str, int]]) -> str:
    """Return the index of all ranks' files as JSON. ``tensors``: tensor -> (file, bytes)."""
    index = {
        "metadata": {"total_size": sum(size for _, size in tensors.values())},
        "weight_map": {name: file for name, (file, _) in sorted(tensors.items())},
    }
    return json.dumps(index, indent=1)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
