"""Reads of a checkpoint's tensors without ranks: boxes, padding, batches, and what does not fit."""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from upath import UPath

from grpo_worker.checkpointing.object_files import upload
from grpo_worker.checkpointing.store import Origin, commit, directory
from grpo_worker.common.store_path import StorePath
from grpo_worker.megatron.conversion.checkpoint_map import EMBEDDING, StoredTensor
from grpo_worker.megatron.export import stored_checkpoint
from grpo_worker.megatron.export.stored_checkpoint import StoredCheckpoint

VOCABULARY = torch.arange(40.0).view(10, 4).bfloat16()
LAYERS = torch.arange(24.0).view(2, 3, 4)
EXPERTS = torch.arange(48.0).view(2, 2, 3, 4)


@pytest.fixture(params=["files", "objects"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> StoredCheckpoint:
    path = directory(tmp_path, 1)
    state = {EMBEDDING: VOCABULARY, "layers": LAYERS, "experts": EXPERTS}
    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    root: StorePath = tmp_path
    if request.param == "objects":
        root = UPath(f"memory://runs{tmp_path}", use_listings_cache=False)
        _upload(path, directory(root, 1))
    commit(root, 1, Origin("tiny", "one rank"))
    return StoredCheckpoint(directory(root, 1))


def _upload(checkpoint: Path, to: UPath) -> None:
    """Copy a checkpoint to an object store as ranks write it there, with a digest of each tensor."""
    spans = defaultdict(list)
    for info in FileSystemReader(checkpoint).read_metadata().storage_data.values():
        spans[info.relative_path].append((info.offset, info.length))
    for name, pieces in spans.items():
        data = (checkpoint / name).read_bytes()
        upload(to / name, [partial(_write, data[start:][:length]) for start, length in sorted(pieces)])
    (to / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes())


def _write(data: bytes, stream: Any) -> int:
    return int(stream.write(data))


def _read(checkpoint: StoredCheckpoint, *wanted: StoredTensor) -> list[torch.Tensor]:
    found = list(checkpoint.read(wanted))
    assert [tensor for tensor, _ in found] == list(wanted)
    return [values for _, values in found]


@pytest.mark.parametrize("batch_bytes", [1, 50, 2**20])
def test_boxes_are_read_in_batches(
    checkpoint: StoredCheckpoint, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_checkpoint, "BATCH_BYTES", batch_bytes)
    wanted = [StoredTensor("layers", (layer,), (3, 4), ()) for layer in range(2)]
    wanted += [StoredTensor("experts", (layer, 1), (3, 4), ()) for layer in range(2)]
    found = _read(checkpoint, *wanted)
    assert [values.tolist() for values in found] == [*LAYERS.tolist(), *EXPERTS[:, 1].tolist()]


def test_padding_of_the_vocabulary_is_cut(checkpoint: StoredCheckpoint) -> None:
    (found,) = _read(checkpoint, StoredTensor(EMBEDDING, (), (7, 4), (), padded=True))
    assert torch.equal(found, VOCABULARY[:7]) and found.dtype is checkpoint.dtype(EMBEDDING) is torch.bfloat16
    (whole,) = _read(checkpoint, StoredTensor(EMBEDDING, (), (10, 4), (), padded=True))
    assert torch.equal(whole, VOCABULARY)


@pytest.mark.parametrize(
    "wanted",
    [
        StoredTensor(EMBEDDING, (), (7, 4), ()),
        StoredTensor(EMBEDDING, (), (11, 4), (), padded=True),
        StoredTensor("layers", (2,), (3, 4), ()),
        StoredTensor("layers", (), (3, 4), ()),
        StoredTensor("experts", (0,), (3, 4), ()),
    ],
)
def test_a_tensor_of_another_shape_is_refused(checkpoint: StoredCheckpoint, wanted: StoredTensor) -> None:
    with pytest.raises(ValueError, match=rf"{wanted.key} has the shape .* does not hold"):
        _read(checkpoint, wanted)


def test_a_tensor_that_is_not_there_is_named(checkpoint: StoredCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"step-00000001 lacks output_layer\.weight: use another checkpoint"):
        _read(checkpoint, StoredTensor("output_layer.weight", (), (7, 4), ()))
