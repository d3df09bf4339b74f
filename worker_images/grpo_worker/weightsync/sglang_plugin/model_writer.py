"""Model writer: writes the buckets of a version into one model of an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.protocol.buffers import MARGIN
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, by_module, make_copy_plan, storages
from grpo_worker.weightsync.sglang_plugin.load_tracer import trace_load
from grpo_worker.weightsync.sglang_plugin.staged_receiver import Spec, view_of

BucketKey = tuple[str, int]  # plan id and bucket
_Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of post_load_weights


@dataclass(frozen=True, slots=True)
class _TracedBucket:
    """Result of tracing the first load of a bucket.

    ``post_load``: the model's calls of ``post_load_weights``, to be made after each later load.
    ``deferred``: they need more memory than the margin of a bucket, so they run once all buckets are freed.
    """

    copy_plan: CopyPlan
    post_load: list[_Call]
    deferred: bool


@dataclass(frozen=True, slots=True)
class Written:
    """Result of writing a bucket: copies made, tensors that the model's own loader loaded, and whether the
    load was traced.
    """

    copies: int
    by_loader: int
    traced: bool


class ModelWriter:
    """Writes buckets into ``model``: first by the model's own loader, later by traced copies.

    ``loaded``: names of the tensors of which the model holds at least a part.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.loaded: set[str] = set()
        self._traced: dict[BucketKey, _TracedBucket] = {}
        self._current: frozenset[int] = frozenset()
        self._deferred: list[_Call] = []
        self._memory = ExtraMemory(device)

    def begin(self, memory: "ExtraMemory") -> None:
        """Prepare for a version, whose use of memory ``memory`` measures."""
        self._memory, self._deferred = memory, []
        self._current = storages((*self.model.parameters(), *self.model.buffers()))

    def forget(self) -> None:
        """Forget all traces, so that the next version is loaded by the model's own loader."""
        self._traced.clear()

    def write(self, key: BucketKey, flat: torch.Tensor, bucket: Sequence[Spec]) -> Written:
        """Write the bucket ``flat`` (uint8 [bytes of the bucket]) into the model.

        Raises any error of the model's own loader.
        """
        traced = self._traced.get(key)
        fresh = False
        if traced is None or not traced.copy_plan.storages <= self._current:
            traced = self._traced[key] = self._trace(flat, bucket)
            fresh = True
        else:
            self._replay(traced, flat, bucket)
        return Written(len(traced.copy_plan.steps), len(traced.copy_plan.by_loader), fresh)

    def finish(self) -> None:
        """Make the deferred calls of ``post_load_weights``, once the memory of all buckets is free."""
        for args, kwargs in self._deferred:
            self.model.post_load_weights(*args, **kwargs)

    def _trace(self, flat: torch.Tensor, bucket: Sequence[Spec]) -> _TracedBucket:
        """Load a bucket by the model's own loader and trace it."""
        tensors = [(spec.name, view_of(flat, spec)) for spec in bucket]
        calls: list[tuple[_Call, int]] = []  # with the bytes that each needs
        original = getattr(self.model, "post_load_weights", None)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            assert original is not None
            result, nbytes = self._memory.measure(lambda: original(*args, **kwargs))
            calls.append(((args, kwargs), nbytes))
            return result

        if original:
            self.model.post_load_weights = recorded
        try:
            load_trace = trace_load(self.model.load_weights, tensors)
        finally:
            if original:
                del self.model.post_load_weights
        names = load_trace.copies.keys() | load_trace.unexplained.keys()
        self.loaded |= names
        deferred = any(nbytes > len(flat) // MARGIN for _, nbytes in calls)
        copy_plan = make_copy_plan(load_trace, flat, by_module(spec.name for spec in bucket))
        # A bucket without tensors of this model leaves nothing to be done after it.
        return _TracedBucket(copy_plan, [call for call, _ in calls[-1:]] if names else [], deferred)

    def _replay(self, traced: _TracedBucket, flat: torch.Tensor, bucket: Sequence[Spec]) -> None:
        copy_plan = traced.copy_plan
        copy_plan.replay(flat)
        if copy_plan.by_loader:
            rest = [(spec.name, view_of(flat, spec)) for spec in bucket if spec.name in copy_plan.by_loader]
            self.model.load_weights(rest)
        if traced.deferred:
            self._deferred += [call for call in traced.post_load if call not in self._deferred]
            return
        for args, kwargs in traced.post_load:
            self.model.post_load_weights(*args, **kwargs)


class ExtraMemory:
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
