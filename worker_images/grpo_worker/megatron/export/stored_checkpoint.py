"""Tensors of a complete checkpoint, read by one process without ranks and without a model."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from grpo_worker.checkpointing.checked_reads import OBJECT_FILES, check_reads
from grpo_worker.checkpointing.object_files import ObjectFiles
from grpo_worker.checkpointing.store import DamagedCheckpointError, state_folder
from grpo_worker.common.store_path import StorePath, patiently
from grpo_worker.megatron.conversion.checkpoint_map import StoredTensor

# Read at once, or a single larger tensor. Within a batch the pieces of a bucket are read ahead.
BATCH_BYTES = 256 << 20


class _Reader(FileSystemReader):
    """Reader that finds changed bytes, like those of the ranks."""


check_reads(_Reader)


class StoredCheckpoint:
    """The tensors of a checkpoint by their keys."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        folder = state_folder(path)
        metadata = _metadata(folder)
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._reader = _Reader(str(folder))
        if not isinstance(path, Path):
            OBJECT_FILES[str(self._reader.path)] = ObjectFiles(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all tensors, also those of the optimizer and of other models."""
        return frozenset(self._tensors)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises ValueError if there is none."""
        return self._entry(key).properties.dtype

    def size(self, tensor: StoredTensor) -> int:
        """Return the bytes of a tensor.

        Raises ValueError if the checkpoint lacks it or has one of another shape.
        """
        entry, dims = self._entry(tensor.key), len(tensor.index)
        found = tuple(entry.size)
        lead, rest = found[:dims], found[dims:]
        inside = len(lead) == dims and all(place < end for place, end in zip(tensor.index, lead, strict=True))
        rows = rest[:1] == tensor.shape[:1] or (tensor.padded and rest[:1] > tensor.shape[:1])
        if not (inside and rows and rest[1:] == tensor.shape[1:]):
            raise ValueError(
                f"checkpoint {self._path}: {tensor.key} has the shape {found}, which does not hold "
                f"{tensor.shape} at {tensor.index}: use another checkpoint"
            )
        return math.prod(tensor.shape) * entry.properties.dtype.itemsize

    def read(self, tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
        """Read tensors in this order, a batch at a time.

        Raises DamagedCheckpointError when the bytes are not those that were saved, and OSError.
        """
        for batch in self._batches(tensors):
            found = self._read(batch)
            for tensor in batch:
                yield tensor, found.pop(0)

    def _batches(self, tensors: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
        batch, total = list[StoredTensor](), 0
        for tensor in tensors:
            size = self.size(tensor)
            if batch and total + size > BATCH_BYTES:
                yield batch
                batch, total = [], 0
            batch.append(tensor)
            total += size
        if batch:
            yield batch

    def _read(self, batch: Sequence[StoredTensor]) -> list[torch.Tensor]:
        targets, items = _Targets(), list[ReadItem]()
        for tensor in batch:
            entry, dims = self._entry(tensor.key), len(tensor.index)
            start = torch.Size((*tensor.index, *(0 for _ in tensor.shape)))
            box = ChunkStorageMetadata(start, torch.Size((*(1 for _ in range(dims)), *tensor.shape)))
            targets.add(tensor.key, box, self.dtype(tensor.key))
            own = create_read_items_for_chunk_list(tensor.key, entry, [box])
            if sum(math.prod(item.lengths) for item in own) != math.prod(tensor.shape):
                raise DamagedCheckpointError(
                    f"checkpoint {self._path} has only parts of {tensor.key}: use another checkpoint"
                )
            items += own
        self._reader.read_data(LoadPlan(items), cast(Any, targets)).wait()
        return [whole.view(tensor.shape) for whole, tensor in zip(targets.all, batch, strict=True)]

    def _entry(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise ValueError(f"checkpoint {self._path} lacks {key}: use another checkpoint")
        return self._tensors[key]


def _metadata(folder: StorePath) -> Metadata:
    """Return the description of a checkpoint's tensors, which torch reads from a file system only."""
    file = folder / ".metadata"
    content = patiently(file.read_bytes, f"reading {file}")
    with TemporaryDirectory() as copy:
        (Path(copy) / file.name).write_bytes(content)
        return FileSystemReader(copy).read_metadata()


class _Targets:
    """Tensors that a reader fills, with the methods that it calls on a planner."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, torch.Size | None], torch.Tensor] = {}

    @property
    def all(self) -> list[torch.Tensor]:
        return list(self._places.values())

    def add(self, key: str, box: ChunkStorageMetadata, dtype: torch.dtype) -> None:
        self._places[key, box.offsets] = torch.empty(box.sizes, dtype=dtype)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        place: MetadataIndex = item.dest_index
        return narrow_tensor_by_index(self._places[place.fqn, place.offset], item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None: ...
