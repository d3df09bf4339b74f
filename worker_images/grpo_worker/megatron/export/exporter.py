"""Export of all ranks' weights as a Hugging Face directory; no rank ever holds the whole model."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_worker.megatron.export.companions import write_companions
from grpo_worker.megatron.export.config import Quantization, exported_config
from grpo_worker.megatron.export.files import FileWriter, WriteReport, write_index
from grpo_worker.megatron.export.tensors import stored, whole_tensors
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.host_sync.barrier import store_barrier
from grpo_worker.profiling.progress import PROGRESS


class ExportError(RuntimeError):
    """The directory was not written; every rank raises the same error."""


def export(
    target: Path,
    hf: dict[str, Any],
    chunks: Sequence[Any],
    family: Family,
    source: Path | None = None,
    quantization: Quantization = "none",
) -> None:
    """Write ``target`` with config.json, safetensors files and their index. Collective.

    Each tensor-parallel group gathers its tensors on its first rank, which writes them and keeps at most one
    file in memory. ``source``: the Hugging Face directory that the job started from, whose tokenizer and
    other small files are copied; None for a preset. ``target`` appears, or is replaced, when it is complete.

    Raises ExportError on every rank when any of them cannot write.
    """
    building = target.with_name(target.name + ".incomplete")
    _on_first_rank(target, lambda: _begin(building, hf, source))
    writer = FileWriter(building, dist.get_rank())
    for name, tensor in whole_tensors(chunks, family):
        if not writer.failed:  # a failed rank must still take part in gathering
            writer.add(stored(name, tensor, quantization))
        PROGRESS.add("tensors exported")
    writer.flush()
    reports = _gathered_reports(writer.report)
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")

    def finish() -> None:
        _raise_failure(reports)
        tensors = {name: entry for report in reports for name, entry in report.tensors.items()}
        write_index(building, tensors)
        config = exported_config(hf, tensors, dtype, quantization)
        (building / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)

    try:
        _on_first_rank(target, finish)
    except ExportError:
        if dist.get_rank() == 0:  # incomplete files would fill the store
            shutil.rmtree(building, ignore_errors=True)
        raise


def _begin(folder: Path, hf: dict[str, Any], source: Path | None) -> None:
    """Create the folder and write the small files first, so that a missing one is reported early."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_companions(folder, hf, source)


def _raise_failure(reports: Sequence[WriteReport]) -> None:
    failures = [report.failure for report in reports if report.failure is not None]
    if failures:
        raise OSError(f"{failures[0]} ({len(failures)} of {len(reports)} ranks failed)")


def _gathered_reports(report: WriteReport) -> list[WriteReport]:
    """Gather the reports of all ranks, in rank order, on rank 0; return an empty list elsewhere."""
    _await_all()
    first = dist.get_rank() == 0
    reports: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(report, reports if first else None, dst=0)
    return reports if first else []


def _on_first_rank(target: Path, action: Callable[[], None]) -> None:
    """Run an action on rank 0; all ranks wait for it, and all raise ExportError when it fails."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - otherwise the other ranks would wait for this one
            failure = [f"checkpoint.store: {target} was not exported: {error}"]
    _await_all()
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ExportError(failure[0])


def _await_all() -> None:
    store_barrier(range(dist.get_world_size())).wait()
