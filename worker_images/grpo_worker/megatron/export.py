"""Write the weights of all ranks as a Hugging Face directory, without gathering the model anywhere."""

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_worker.megatron.families.family import Family
from grpo_worker.megatron.weights import axis, shards

FILE_BYTES = 2 * 2**30
INDEX = "model.safetensors.index.json"


def export(
    target: Path, hf: dict[str, Any], chunks: Sequence[Any], family: Family, source: Path | None = None
) -> None:
    """Write ``target`` with config.json, safetensors files and their index; collective.

    Each tensor-parallel group puts its tensors together on its first rank, which writes them, at
    most one file at a time in memory. ``source``: a Hugging Face directory whose tokenizer goes along.
    ``target`` appears when it is complete; one that exists is replaced.
    """
    building = target.with_name(target.name + ".incomplete")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
    dist.barrier()
    written = _write_files(building, rank, _whole_tensors(chunks, family))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, written)
    if rank == 0:
        _finish(building, hf, every, source)
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
    dist.barrier()


def _whole_tensors(chunks: Sequence[Any], family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that this rank writes; its group takes part in putting each together."""
    for name, boxes in groupby(shards(chunks, family), key=lambda shard: shard.name):
        group, first_replica = axis(name)
        if not first_replica:
            continue
        parts = list(boxes)
        tensor = torch.cat([box.tensor for box in parts], dim=parts[0].dim)
        if tuple(tensor.shape) != parts[0].shape:
            whole = _gathered(tensor, parts[0].dim, group)
            if whole is not None:
                yield name, whole.cpu()
        elif parts[0].owner:
            yield name, tensor.cpu()


def _gathered(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor | None:
    first = group.rank() == 0
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if first else None
    dist.gather(tensor, parts, group=group, group_dst=0)
    return torch.cat(parts, dim=dim) if parts else None


def _write_files(
    folder: Path, rank: int, tensors: Iterator[tuple[str, torch.Tensor]]
) -> dict[str, tuple[str, int]]:
    """Tensor name -> (file, bytes). A file is written as soon as it is full."""
    written: dict[str, tuple[str, int]] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            number = len({file for file, _ in written.values()})
            file = f"model-{rank:05d}-{number:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            written.update({name: (file, tensor.nbytes) for name, tensor in pending.items()})
            pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        pending[name] = tensor.contiguous()
    flush()
    return written


def _finish(
    folder: Path, hf: dict[str, Any], every: Sequence[dict[str, tuple[str, int]]], source: Path | None
) -> None:
    found = {name: place for written in every for name, place in written.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in found.values())},
        "weight_map": {name: file for name, (file, _) in sorted(found.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(hf, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if source is not None and (source / name).is_file():
            shutil.copy(source / name, folder / name)
