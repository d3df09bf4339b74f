"""One version into one model: receive a bucket while the one before is written."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from grpo_worker.weightsync.protocol.buffers import MARGIN, aligned
from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, merged
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, homes, make_copy_plan
from grpo_worker.weightsync.sglang_plugin.load_tracer import record
from grpo_worker.weightsync.sglang_plugin.receivers import DirectLoadError, Receiver, Spec, view_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by place and by name


@dataclass(slots=True)
class _Known:
    """What is known of a bucket since it was loaded first. ``after``: the model's own work after
    loading, to be repeated each time; ``late``: it needs more memory than is spared beside a bucket."""

    copy_plan: CopyPlan
    after: list[_Call]
    late: bool


@dataclass(slots=True)
class Report:
    """What was done, for the agent. ``taken``: the names of which this rank holds something."""

    copies: int = 0
    by_loader: int = 0
    recorded: int = 0
    taken: set[str] = field(default_factory=set)
    fingerprints: list[int] = field(default_factory=list)
    extra_bytes: int = 0  # of the device's memory, beyond what was taken before
    seconds: dict[str, float] = field(default_factory=dict)


class DirectLoader:
    """Loads versions into ``model``: the first through its own loader, later ones by what was seen."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._known: dict[tuple[str, int], _Known] = {}
        self._taken: set[str] = set()
        self._memory = _ExtraMemory(device)

    def load(self, plan_id: str, buckets: Sequence[Sequence[Spec]], incoming: Receiver) -> Report:
        """Receive and write every bucket.

        All buckets are received also after one could not be written, because others wait for this rank.
        Raises DirectLoadError when the bytes are not those that were sent, or one could not be loaded;
        LinkError when bytes do not come.
        """
        report = Report()
        self._memory = _ExtraMemory(self._device)
        started = time.monotonic()
        try:
            problem = self._load_all(plan_id, buckets, incoming, report)
            report.fingerprints = incoming.verified()
            if problem:
                raise DirectLoadError(problem)
        except RuntimeError:
            self._known.clear()
            raise
        report.seconds["receive_and_load"] = time.monotonic() - started
        report.taken, report.extra_bytes = self._taken, self._memory.bytes()
        return report

    def kept(self, plan_id: str, buckets: Sequence[Sequence[Spec]]) -> list[list[ByteRange]] | None:
        """The bytes of each bucket that loads of this plan take from it; None if that is not known."""
        known = [self._known.get((plan_id, index)) for index in range(len(buckets))]
        copy_plans = [each.copy_plan for each in known if each is not None]
        if len(copy_plans) < len(buckets):
            return None
        return [_kept(copy_plan, bucket) for copy_plan, bucket in zip(copy_plans, buckets, strict=True)]

    def _load_all(
        self, plan_id: str, buckets: Sequence[Sequence[Spec]], incoming: Receiver, report: Report
    ) -> str:
        """What went wrong with a bucket, or an empty text."""
        problem, after = "", _After(self._model)
        here = homes((*self._model.parameters(), *self._model.buffers()))
        for index, flat in self._received(buckets, incoming, report):
            try:
                if not problem:
                    key = plan_id, index
                    after.add(self._load(key, here, flat, buckets[index], report, incoming.partial))
            except Exception as error:
                problem = f"bucket {index}: {type(error).__name__}: {error}"
        del flat  # the model's own work may need as much memory
        return problem or after.run()

    def _received(
        self, buckets: Sequence[Sequence[Spec]], incoming: Receiver, report: Report
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each bucket's bytes, the next one under way. A device orders the reuse of memory by itself: a
        transfer that is begun later waits for the copies that were begun before."""
        sizes = [bucket[-1].start + bucket[-1].nbytes for bucket in buckets]
        places = _places([aligned(size) + incoming.beside(i) for i, size in enumerate(sizes)], self._device)
        views = [(place[:size], place[aligned(size) :]) for place, size in zip(places, sizes, strict=True)]
        work = incoming.receive(0, *views[0])
        for index, (view, _) in enumerate(views):
            following = incoming.receive(index + 1, *views[index + 1]) if index + 1 < len(views) else None
            began = time.monotonic()
            work.wait()
            report.seconds["wait"] = report.seconds.get("wait", 0.0) + time.monotonic() - began
            yield index, view
            if following is not None:
                work = following

    def _load(
        self,
        key: tuple[str, int],
        here: frozenset[int],
        flat: torch.Tensor,
        bucket: Sequence[Spec],
        report: Report,
        partial: bool,
    ) -> list[_Call]:
        """Write one bucket. What the model still has to do, when the buckets' memory is free again."""
        known = self._known.get(key)
        if known is None or not known.copy_plan.homes <= here:
            if partial:  # what the model's own loader would look for has not come
                raise DirectLoadError(
                    "the parameters are elsewhere than when this link was told what is kept"
                )
            known = self._known[key] = self._record(flat, bucket)
            report.recorded += 1
            left: list[_Call] = []
        else:
            self._repeat(known, flat, bucket)
            left = known.after if known.late else []
        report.copies += len(known.copy_plan.steps)
        report.by_loader += len(known.copy_plan.by_loader)
        return left

    def _record(self, flat: torch.Tensor, bucket: Sequence[Spec]) -> _Known:
        tensors = [(spec.name, view_of(flat, spec)) for spec in bucket]
        after: list[tuple[_Call, int]] = []  # with the bytes that each needs
        original = getattr(self._model, "post_load_weights", None)

        def seen(*args: Any, **kwargs: Any) -> Any:
            assert original is not None
            result, nbytes = self._memory.of(lambda: original(*args, **kwargs))
            after.append(((args, kwargs), nbytes))
            return result

        if original:
            self._model.post_load_weights = seen
        try:
            load_trace = record(self._model.load_weights, tensors)
        finally:
            if original:
                del self._model.post_load_weights
        self._taken |= load_trace.copies.keys() | load_trace.unexplained.keys()
        late = any(nbytes > len(flat) // MARGIN for _, nbytes in after)
        copy_plan = make_copy_plan(load_trace, flat, _partners(bucket))
        return _Known(copy_plan, [call for call, _ in after[-1:]], late)

    def _repeat(self, known: _Known, flat: torch.Tensor, bucket: Sequence[Spec]) -> None:
        known.copy_plan.repeat(flat)
        if known.copy_plan.by_loader:
            rest = [
                (spec.name, view_of(flat, spec)) for spec in bucket if spec.name in known.copy_plan.by_loader
            ]
            self._model.load_weights(rest)
        if not known.late:
            for args, kwargs in known.after:
                self._model.post_load_weights(*args, **kwargs)


class _After:
    """The model's own work on what was written, as far as it must wait until all is; each once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calls: list[_Call] = []

    def add(self, calls: Sequence[_Call]) -> None:
        self._calls += [call for call in calls if call not in self._calls]

    def run(self) -> str:
        """What went wrong, or an empty text."""
        try:
            for args, kwargs in self._calls:
                self._model.post_load_weights(*args, **kwargs)
        except Exception as error:
            return f"after loading: {type(error).__name__}: {error}"
        return ""


def _places(sizes: Sequence[int], device: str) -> list[torch.Tensor]:
    """Memory for each of these numbers of bytes, of which two neighbours are in use at once: they lie at the
    two ends of one stretch, by turns. Sizes are aligned."""
    most = max(map(sum, pairwise(sizes)), default=sizes[0])
    memory = torch.empty(most, dtype=torch.uint8, device=device)
    return [memory[most - size :] if index % 2 else memory[:size] for index, size in enumerate(sizes)]


def _kept(copy_plan: CopyPlan, bucket: Sequence[Spec]) -> list[ByteRange]:
    by_loader = [(s.start, s.start + s.nbytes) for s in bucket if s.name in copy_plan.by_loader]
    return merged([*copy_plan.reads, *by_loader])


class _ExtraMemory:
    """By how much a GPU's memory in use rises from now on, at most."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._most = 0  # until the peak was last forgotten
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def bytes(self) -> int:
        return max(self._most, torch.cuda.max_memory_allocated() - self._before) if self._cuda else 0

    def of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """What ``work`` returns, and by how much it alone raises the memory in use."""
        if not self._cuda:
            return work(), 0
        self._most = self.bytes()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before


def _partners(bucket: Sequence[Spec]) -> list[list[str]]:
    """Tensors of one module: a loader that fuses some needs them together."""
    groups: dict[str, list[str]] = {}
    for spec in bucket:
        groups.setdefault(spec.name.rsplit(".", 2)[0], []).append(spec.name)
    return [names for names in groups.values() if len(names) > 1]
