"""Loader: writes a version into an engine's models; the next bucket is received while one is written."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from grpo_worker.weightsync.protocol.buffers import aligned
from grpo_worker.weightsync.sglang_plugin.model_writer import ExtraMemory, ModelWriter
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError, Spec, StagedReceiver


@dataclass(slots=True)
class Report:
    """Report of a load, for the agent.

    ``copies``: copies made. ``by_loader``: tensors that a model's own loader loaded.
    ``recorded``: buckets that were traced. ``loaded``: names of which this rank holds at least a part.
    ``extra_bytes``: peak of the device's memory above its level before the load.
    """

    copies: int = 0
    by_loader: int = 0
    recorded: int = 0
    loaded: set[str] = field(default_factory=set)
    fingerprints: list[int] = field(default_factory=list)
    extra_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class DirectLoader:
    """Loads versions into the models of an engine's rank.

    ``models``: the served model, then the models that draft for it. Each bucket is received once and written
    into all of them.
    """

    def __init__(self, models: Sequence[Any], device: str) -> None:
        self._device = device
        self._writers = [ModelWriter(model, device) for model in models]

    def load(self, plan_id: str, buckets: Sequence[Sequence[Spec]], receiver: StagedReceiver) -> Report:
        """Receive and write every bucket.

        After a bucket that cannot be written the others are still received, because their senders wait for
        this rank. Raises DirectLoadError if received bytes are wrong, a bucket could not be written or a
        draft model got no tensor, and TransferError if bytes are missing.
        """
        report, memory = Report(), ExtraMemory(self._device)

        def load() -> str:
            for writer in self._writers:
                writer.begin(memory)
            return self._load_all(plan_id, buckets, receiver, report) or self._idle_draft()

        try:
            timed_load(load, receiver, report, memory)
        except RuntimeError:
            for writer in self._writers:
                writer.forget()
            raise
        report.loaded = set().union(*(writer.loaded for writer in self._writers))
        return report

    def _idle_draft(self) -> str:
        """Return an error if a draft model got no tensor of the version, else an empty text."""
        for writer in self._writers[1:]:
            if not writer.loaded:
                return idle_draft(writer.model)
        return ""

    def _load_all(
        self, plan_id: str, buckets: Sequence[Sequence[Spec]], receiver: StagedReceiver, report: Report
    ) -> str:
        """Load the buckets; return the first error, or an empty text."""
        problem = ""
        sizes = [bucket[-1].start + bucket[-1].nbytes for bucket in buckets]
        for index, flat in received(sizes, receiver, report, self._device):
            try:
                if not problem:
                    self._write((plan_id, index), flat, buckets[index], report)
            except Exception as error:  # noqa: BLE001 - the remaining buckets must be received all the same
                problem = f"bucket {index}: {type(error).__name__}: {error}"
        del flat  # free the buckets: the deferred calls may need as much memory
        if problem:
            return problem
        try:
            for writer in self._writers:
                writer.finish()
        except Exception as error:  # noqa: BLE001 - the error goes back to the agent
            return f"after loading: {type(error).__name__}: {error}"
        return ""

    def _write(
        self, key: tuple[str, int], flat: torch.Tensor, bucket: Sequence[Spec], report: Report
    ) -> None:
        written = [writer.write(key, flat, bucket) for writer in self._writers]
        report.copies += sum(each.copies for each in written)
        report.by_loader += sum(each.by_loader for each in written)
        report.recorded += any(each.traced for each in written)


def timed_load(
    load: Callable[[], str], receiver: StagedReceiver, report: Report, memory: ExtraMemory
) -> None:
    """Run ``load``, which returns a problem or an empty text, and complete its report.

    Raises DirectLoadError for a problem, or if received bytes are wrong.
    """
    started = time.monotonic()
    problem = load()
    report.fingerprints = receiver.verify()
    if problem:
        raise DirectLoadError(problem)
    report.seconds["receive_and_load"] = time.monotonic() - started
    report.extra_bytes = memory.peak()


def received(
    sizes: Sequence[int], receiver: StagedReceiver, report: Report, device: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each bucket's bytes, while the next bucket is being received.

    Reusing a buffer needs no synchronization: the device starts the transfer of a later bucket after the
    copies of an earlier one that were launched before it.
    """
    buffers = _bucket_buffers([aligned(size) for size in sizes], device)
    flats = [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]
    wait = receiver.receive(flats[0])
    for index, flat in enumerate(flats):
        wait_for_next = receiver.receive(flats[index + 1]) if index + 1 < len(flats) else None
        began = time.monotonic()
        wait()
        report.seconds["wait"] = report.seconds.get("wait", 0.0) + time.monotonic() - began
        yield index, flat
        if wait_for_next is not None:
            wait = wait_for_next


def idle_draft(model: Any) -> str:
    """Return the error of a version without tensors of ``model``, which drafts."""
    return (
        f"the version has no tensors of {type(model).__name__}, which drafts for the engine: set "
        "spec.model.multiTokenPrediction to true, or engine.speculative to none"
    )


def _bucket_buffers(sizes: Sequence[int], device: str) -> list[torch.Tensor]:
    """Return a buffer for each size (aligned bytes) in memory for the largest two consecutive buckets.

    Only two consecutive buckets are in use at a time, so they alternate between both ends of the memory.
    """
    total = max(map(sum, pairwise(sizes)), default=sizes[0])
    memory = torch.empty(total, dtype=torch.uint8, device=device)
    return [memory[total - size :] if index % 2 else memory[:size] for index, size in enumerate(sizes)]
