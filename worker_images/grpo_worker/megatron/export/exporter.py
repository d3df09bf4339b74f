"""Export of all ranks' weights as a Hugging Face directory; no rank ever holds the whole model."""

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_worker.checkpointing.exports import CONFIG
from grpo_worker.common.rank_errors import ExportError
from grpo_worker.common.store_path import StorePath
from grpo_worker.common.store_problems import UnwritableStoreError, errno_of
from grpo_worker.megatron.export.companions import write_companions
from grpo_worker.megatron.export.config import Quantization, exported_config
from grpo_worker.megatron.export.files import FileWriter, WriteReport, index_of, stored
from grpo_worker.megatron.export.owner import AttemptOwner
from grpo_worker.megatron.export.place import ExportPlace, place_of
from grpo_worker.megatron.export.tensors import whole_tensors
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.host_sync.notes import leave, read, take
from grpo_worker.model_files.names import INDEX
from grpo_worker.profiling.background import join
from grpo_worker.profiling.progress import PROGRESS

_NUMBERS = itertools.count()  # of the exports of this process; all ranks take part in each


def begin_export(
    target: StorePath,
    hf: dict[str, Any],
    chunks: Sequence[Any],
    family: Family,
    source: Path | None = None,
    quantization: Quantization = "none",
    beside: bool = True,
    attempt: int = 0,
) -> "Future[None]":
    """Start to write ``target`` with config.json, safetensors files and their index. Collective.

    Each tensor-parallel group gathers its tensors on its first rank, which writes them. ``source``: the
    Hugging Face directory that the job started from, whose tokenizer and other small files are copied; None
    for a preset. ``target`` appears, or is replaced, when it is complete.

    ``beside``: threads write a copy of the weights after this has returned, so the weights may change; else
    the first ranks keep at most one file in memory. The future ends on all ranks when the export is complete,
    with ExportError on every rank when any of them cannot write. ``attempt``: of the job whose folder
    ``target`` is in; ranks of an older one, which may still write, cannot complete theirs.
    """
    place = place_of(target, AttemptOwner(attempt))
    together = _Together(f"export/{next(_NUMBERS)}", str(target))
    thread = ThreadPoolExecutor(1, thread_name_prefix="export")
    prepared = thread.submit(
        together.on_first_rank, "folder", lambda: place.begin(lambda to: write_companions(to, hf, source))
    )
    if not beside:
        join(prepared)  # so that a missing file is reported early
    writer = FileWriter(place, dist.get_rank(), thread, beside)
    for name, tensor in whole_tensors(chunks, family):
        if not writer.failed:  # a failed rank must still take part in gathering
            writer.add(stored(name, tensor, quantization))
        PROGRESS.add("tensors exported")
    writer.flush()
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")

    def config(tensors: Collection[str]) -> dict[str, Any]:
        return exported_config(hf, tensors, dtype, quantization)

    def finish() -> None:
        prepared.result()
        together.finish(place, writer.report, config)

    ended = thread.submit(finish)
    thread.shutdown(wait=False)
    return ended


class _Together:
    """Joint work of all ranks' threads in one export. ``key``: names it, the same on all ranks."""

    def __init__(self, key: str, target: str) -> None:
        self._key, self._target = key, target

    def finish(
        self, place: ExportPlace, report: WriteReport, config: Callable[[Collection[str]], dict[str, Any]]
    ) -> None:
        """Complete the export on rank 0 when all ranks have written; the others wait for that."""
        rank = dist.get_rank()
        if rank:
            leave(f"{self._key}/report/{rank}", report.to_json())

        def complete() -> None:
            others = range(1, dist.get_world_size())
            notes = [take(f"{self._key}/report/{other}") for other in others]
            reports = [report, *map(WriteReport.from_json, notes)]
            try:
                _raise_failure(reports)
                tensors = {name: entry for each in reports for name, entry in each.tensors.items()}
                text = json.dumps(config(tensors), indent=1, sort_keys=True)
                place.complete({INDEX: index_of(tensors), CONFIG: text})
            except (OSError, UnwritableStoreError):
                place.discard()
                raise

        self.on_first_rank("result", complete)

    def on_first_rank(self, stage: str, action: Callable[[], None]) -> None:
        """Run an action on rank 0; the others wait for it, and all raise ExportError when it fails."""
        key = f"{self._key}/{stage}"
        if dist.get_rank() == 0:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - otherwise the other ranks would wait for this one
                text = f"checkpoint.store: {self._target} was not exported: {error}"
                leave(key, json.dumps([text, errno_of(error)]))
            else:
                leave(key, "")
        if problem := read(key):
            raise ExportError(*json.loads(problem))


def _raise_failure(reports: Sequence[WriteReport]) -> None:
    failed = [(rank, report) for rank, report in enumerate(reports) if report.failure is not None]
    if failed:
        rank, first = failed[0]
        text = f"rank {rank} {first.failure} ({len(failed)} of {len(reports)} ranks failed)"
        raise UnwritableStoreError(text, first.errno)
