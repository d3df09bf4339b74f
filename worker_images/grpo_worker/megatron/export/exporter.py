"""Write the weights of all ranks as a Hugging Face directory, without gathering the model anywhere."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_worker.megatron.export.companions import write_companions
from grpo_worker.megatron.export.config import Quantization, exported_config
from grpo_worker.megatron.export.files import FileWriter, Written, write_index
from grpo_worker.megatron.export.store_barrier import store_barrier
from grpo_worker.megatron.export.tensors import stored, whole_tensors
from grpo_worker.megatron.families.base import Family


class ExportError(RuntimeError):
    """No directory was written; every rank raises the same."""


def export(
    target: Path,
    hf: dict[str, Any],
    chunks: Sequence[Any],
    family: Family,
    source: Path | None = None,
    quantization: Quantization = "none",
) -> None:
    """Write ``target`` with config.json, safetensors files and their index; collective.

    Each tensor-parallel group puts its tensors together on its first rank, which writes them, at
    most one file at a time in memory. ``source``: the Hugging Face directory that the job started from,
    whose tokenizer and other small files go along; None: a preset. ``target`` appears when it is complete;
    one that exists is replaced.

    Raises ExportError on every rank when any of them cannot write.
    """
    building = target.with_name(target.name + ".incomplete")
    _on_first_rank(target, lambda: _begin(building, hf, source))
    writer = FileWriter(building, dist.get_rank())
    for name, tensor in whole_tensors(chunks, family):
        if not writer.failed:  # else only take part in gathering
            writer.add(stored(name, tensor, quantization))
    writer.flush()
    every = _gathered_reports(writer.written)
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")

    def finish() -> None:
        _raise_failure(every)
        places = {name: place for written in every for name, place in written.places.items()}
        write_index(building, places)
        config = exported_config(hf, places, dtype, quantization)
        (building / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)

    try:
        _on_first_rank(target, finish)
    except ExportError:
        if dist.get_rank() == 0:  # what is left would fill the store
            shutil.rmtree(building, ignore_errors=True)
        raise


def _begin(folder: Path, hf: dict[str, Any], source: Path | None) -> None:
    """Make the folder and put the small files there: should one be missing, no weights were written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_companions(folder, hf, source)


def _raise_failure(every: Sequence[Written]) -> None:
    failures = [written.failure for written in every if written.failure is not None]
    if failures:
        raise OSError(f"{failures[0]} ({len(failures)} of {len(every)} ranks failed)")


def _gathered_reports(written: Written) -> list[Written]:
    """What every rank wrote, by rank; on rank 0 only."""
    _await_all()
    first = dist.get_rank() == 0
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(written, found if first else None, dst=0)
    return found if first else []


def _on_first_rank(target: Path, action: Callable[[], None]) -> None:
    """Run an action on rank 0; every rank goes on after it, or raises what went wrong."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # the other ranks would wait for this one
            failure = [f"checkpoint.store: {target} was not exported: {error}"]
    _await_all()
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ExportError(failure[0])


def _await_all() -> None:
    store_barrier(range(dist.get_world_size())).wait()
