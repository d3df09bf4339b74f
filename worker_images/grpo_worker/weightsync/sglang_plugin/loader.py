"""Loader: writes a version into the model; the next bucket is received while one is written."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from grpo_worker.weightsync.protocol.buffers import MARGIN, aligned
from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, merged
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, make_copy_plan, storages
from grpo_worker.weightsync.sglang_plugin.load_tracer import trace_load
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, Receiver, Spec, view_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of post_load_weights


@dataclass(slots=True)
class _TracedBucket:
    """Result of tracing the first load of a bucket.

    ``post_load``: the model's calls of ``post_load_weights``, to be made after each later load.
    ``deferred``: they need more memory than the margin of a bucket, so they run once all buckets are freed.
    """

    copy_plan: CopyPlan
    post_load: list[_Call]
    deferred: bool


@dataclass(slots=True)
class Report:
    """Report of a load, for the agent.

    ``copies``: copies made. ``by_loader``: tensors that the model's own loader loaded.
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
    """Loads versions into ``model``: the first by the model's own loader, later ones by traced copies."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._traced: dict[tuple[str, int], _TracedBucket] = {}  # by plan id and bucket
        self._loaded: set[str] = set()
        self._memory = _ExtraMemory(device)

    def load(self, plan_id: str, buckets: Sequence[Sequence[Spec]], receiver: Receiver) -> Report:
        """Receive and write every bucket.

        After a bucket that cannot be written the others are still received, because their senders wait for
        this rank. Raises DirectLoadError if received bytes are wrong or a bucket could not be written, and
        TransferError if bytes are missing.
        """
        report = Report()
        self._memory = _ExtraMemory(self._device)
        started = time.monotonic()
        try:
            problem = self._load_all(plan_id, buckets, receiver, report)
            report.fingerprints = receiver.verify()
            if problem:
                raise DirectLoadError(problem)
        except RuntimeError:
            self._traced.clear()
            raise
        report.seconds["receive_and_load"] = time.monotonic() - started
        report.loaded, report.extra_bytes = self._loaded, self._memory.peak()
        return report

    def used_ranges(self, plan_id: str, buckets: Sequence[Sequence[Spec]]) -> list[list[ByteRange]] | None:
        """Return the byte ranges of each bucket that this rank uses; None until all buckets are traced."""
        traced = [self._traced.get((plan_id, index)) for index in range(len(buckets))]
        copy_plans = [each.copy_plan for each in traced if each is not None]
        if len(copy_plans) < len(buckets):
            return None
        return [_used(copy_plan, bucket) for copy_plan, bucket in zip(copy_plans, buckets, strict=True)]

    def _load_all(
        self, plan_id: str, buckets: Sequence[Sequence[Spec]], receiver: Receiver, report: Report
    ) -> str:
        """Load the buckets; return the first error, or an empty text."""
        problem, deferred = "", _DeferredCalls(self._model)
        current = storages((*self._model.parameters(), *self._model.buffers()))
        for index, flat in self._received(buckets, receiver, report):
            try:
                if not problem:
                    key = plan_id, index
                    deferred.add(self._load(key, current, flat, buckets[index], report, receiver.partial))
            except Exception as error:  # noqa: BLE001 - the remaining buckets must be received all the same
                problem = f"bucket {index}: {type(error).__name__}: {error}"
        del flat  # free the buckets: the deferred calls may need as much memory
        return problem or deferred.run()

    def _received(
        self, buckets: Sequence[Sequence[Spec]], receiver: Receiver, report: Report
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each bucket's bytes, while the next bucket is being received.

        Reusing a buffer needs no synchronization: the device starts the transfer of a later bucket after the
        copies of an earlier one that were launched before it.
        """
        sizes = [bucket[-1].start + bucket[-1].nbytes for bucket in buckets]
        needs = [aligned(size) + receiver.scratch_bytes(i) for i, size in enumerate(sizes)]
        buffers = _bucket_buffers(needs, self._device)
        views = [
            (buffer[:size], buffer[aligned(size) :]) for buffer, size in zip(buffers, sizes, strict=True)
        ]
        pending = receiver.receive(0, *views[0])
        for index, (flat, _) in enumerate(views):
            following = receiver.receive(index + 1, *views[index + 1]) if index + 1 < len(views) else None
            began = time.monotonic()
            pending.wait()
            report.seconds["wait"] = report.seconds.get("wait", 0.0) + time.monotonic() - began
            yield index, flat
            if following is not None:
                pending = following

    def _load(
        self,
        key: tuple[str, int],
        current: frozenset[int],
        flat: torch.Tensor,
        bucket: Sequence[Spec],
        report: Report,
        partial: bool,
    ) -> list[_Call]:
        """Write one bucket; return the calls to make once the memory of all buckets is free.

        ``current``: addresses of the model's storages. ``partial``: only the needed ranges were received.
        """
        traced = self._traced.get(key)
        if traced is None or not traced.copy_plan.storages <= current:
            if partial:  # the model's own loader would need bytes that were not sent
                raise DirectLoadError(
                    "the parameters are elsewhere than when the needed byte ranges were published"
                )
            traced = self._traced[key] = self._trace(flat, bucket)
            report.recorded += 1
            deferred: list[_Call] = []
        else:
            self._replay(traced, flat, bucket)
            deferred = traced.post_load if traced.deferred else []
        report.copies += len(traced.copy_plan.steps)
        report.by_loader += len(traced.copy_plan.by_loader)
        return deferred

    def _trace(self, flat: torch.Tensor, bucket: Sequence[Spec]) -> _TracedBucket:
        """Load a bucket by the model's own loader and trace it."""
        tensors = [(spec.name, view_of(flat, spec)) for spec in bucket]
        calls: list[tuple[_Call, int]] = []  # with the bytes that each needs
        original = getattr(self._model, "post_load_weights", None)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            assert original is not None
            result, nbytes = self._memory.measure(lambda: original(*args, **kwargs))
            calls.append(((args, kwargs), nbytes))
            return result

        if original:
            self._model.post_load_weights = recorded
        try:
            load_trace = trace_load(self._model.load_weights, tensors)
        finally:
            if original:
                del self._model.post_load_weights
        self._loaded |= load_trace.copies.keys() | load_trace.unexplained.keys()
        deferred = any(nbytes > len(flat) // MARGIN for _, nbytes in calls)
        copy_plan = make_copy_plan(load_trace, flat, _partners(bucket))
        return _TracedBucket(copy_plan, [call for call, _ in calls[-1:]], deferred)

    def _replay(self, traced: _TracedBucket, flat: torch.Tensor, bucket: Sequence[Spec]) -> None:
        copy_plan = traced.copy_plan
        copy_plan.replay(flat)
        if copy_plan.by_loader:
            rest = [(spec.name, view_of(flat, spec)) for spec in bucket if spec.name in copy_plan.by_loader]
            self._model.load_weights(rest)
        if not traced.deferred:
            for args, kwargs in traced.post_load:
                self._model.post_load_weights(*args, **kwargs)


class _DeferredCalls:
    """Calls of ``post_load_weights`` to make after all buckets, without duplicates."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calls: list[_Call] = []

    def add(self, calls: Sequence[_Call]) -> None:
        self._calls += [call for call in calls if call not in self._calls]

    def run(self) -> str:
        """Make the calls; return the first error, or an empty text."""
        try:
            for args, kwargs in self._calls:
                self._model.post_load_weights(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the error goes back to the agent
            return f"after loading: {type(error).__name__}: {error}"
        return ""


def _bucket_buffers(sizes: Sequence[int], device: str) -> list[torch.Tensor]:
    """Return a buffer for each size (aligned bytes) in memory for the largest two consecutive buckets.

    Only two consecutive buckets are in use at a time, so they alternate between both ends of the memory.
    """
    total = max(map(sum, pairwise(sizes)), default=sizes[0])
    memory = torch.empty(total, dtype=torch.uint8, device=device)
    return [memory[total - size :] if index % 2 else memory[:size] for index, size in enumerate(sizes)]


def _used(copy_plan: CopyPlan, bucket: Sequence[Spec]) -> list[ByteRange]:
    """Return the byte ranges of a bucket that its copies or the model's own loader read."""
    by_loader = [(s.start, s.start + s.nbytes) for s in bucket if s.name in copy_plan.by_loader]
    return merged([*copy_plan.reads, *by_loader])


class _ExtraMemory:
    """Peak of a GPU's allocated memory above its level at construction; 0 on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._peak = 0  # until the statistics were last reset
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak(self) -> int:
        return max(self._peak, torch.cuda.max_memory_allocated() - self._before) if self._cuda else 0

    def measure(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of ``work`` and the bytes by which it alone raises the allocated memory."""
        if not self._cuda:
            return work(), 0
        self._peak = self.peak()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before


def _partners(bucket: Sequence[Spec]) -> list[list[str]]:
    """Group the tensors of each module: a loader that fuses some of them needs all at once."""
    groups: dict[str, list[str]] = {}
    for spec in bucket:
        groups.setdefault(spec.name.rsplit(".", 2)[0], []).append(spec.name)
    return [names for names in groups.values() if len(names) > 1]
