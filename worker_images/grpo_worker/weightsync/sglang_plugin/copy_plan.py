"""A recorded load as few large copies, to be repeated with other bytes in the same places."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, merged
from grpo_worker.weightsync.sglang_plugin.load_tracer import Copy, LoadTrace


@dataclass(slots=True)
class _Step:
    """``to`` takes ``size``/``stride`` elements of ``dtype`` that begin at byte ``start`` of the bucket."""

    to: torch.Tensor = field(repr=False)
    dtype: torch.dtype
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies of one bucket. ``by_loader``: names that the model's own loader must take. ``reads``: the bytes
    of the bucket that the copies take."""

    steps: tuple[_Step, ...]
    by_loader: frozenset[str]
    homes: frozenset[int]
    reads: tuple[ByteRange, ...]

    def repeat(self, flat: torch.Tensor) -> None:
        """Write the bytes of ``flat`` (uint8 [bytes of the bucket]) into the parameters."""
        pairs = [(step.to, _read(flat, step)) for step in self.steps]
        plain = [(to, source) for to, source in pairs if _alike(to, source)]
        if plain:
            # One launch for many tensors, if all are dense and of one type on both sides.
            torch._foreach_copy_([to for to, _ in plain], [source for _, source in plain])
        for to, source in pairs:
            if not _alike(to, source):
                to.copy_(source)


def homes(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Where the memory of ``tensors`` begins. A recipe holds while its homes are among the model's."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _alike(to: torch.Tensor, source: torch.Tensor) -> bool:
    return to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()


def _read(flat: torch.Tensor, step: _Step) -> torch.Tensor:
    elements = len(flat) // step.dtype.itemsize
    whole = flat[: elements * step.dtype.itemsize].view(step.dtype)
    # as_strided counts from the beginning of the storage, in which the bucket may lie anywhere.
    first = whole.storage_offset() + step.start // step.dtype.itemsize
    return whole.as_strided(step.size, step.stride, first)


def make_copy_plan(
    load_trace: LoadTrace, flat: torch.Tensor, partners: Iterable[Sequence[str]] = ()
) -> CopyPlan:
    """Merge what was seen while the bucket ``flat`` was loaded.

    ``partners``: names that the loader takes only together; if one goes to the loader, all do.
    """
    by_loader = set(load_trace.unexplained)
    for group in partners:
        if by_loader & set(group):
            by_loader |= set(group)
    steps: list[_Step] = []
    for name, copies in load_trace.copies.items():
        if name not in by_loader:
            steps.extend(_step(copy, flat) for copy in copies)
    fewer = _merged(steps)
    reads = merged(_reads(step) for step in fewer)
    return CopyPlan(tuple(fewer), frozenset(by_loader), homes(step.to for step in fewer), tuple(reads))


def _reads(step: _Step) -> ByteRange:
    """From the first byte that a step reads to its last."""
    last = sum((size - 1) * stride for size, stride in zip(step.size, step.stride, strict=True))
    return step.start, step.start + (last + 1) * step.dtype.itemsize


def _step(copy: Copy, flat: torch.Tensor) -> _Step:
    start = copy.source.data_ptr() - flat.data_ptr()
    return _Step(copy.to, copy.source.dtype, start, tuple(copy.source.shape), copy.source.stride())


def _merged(steps: list[_Step]) -> list[_Step]:
    """Neighbours on both sides become one: the experts of a layer are one copy."""
    done: list[_Step] = []
    for step in sorted(steps, key=lambda s: (s.to.data_ptr(), s.start)):
        if done and _continues(done[-1], step):
            done[-1] = _joined(done[-1], step)
        else:
            done.append(step)
    return done


def _dense(step: _Step) -> bool:
    contiguous = torch.empty(step.size, device="meta").stride()
    return step.to.is_contiguous() and step.stride == contiguous


def _continues(first: _Step, second: _Step) -> bool:
    size = first.to.numel() * first.dtype.itemsize
    return (
        first.to.dtype == second.to.dtype == first.dtype == second.dtype
        and first.to.untyped_storage().data_ptr() == second.to.untyped_storage().data_ptr()
        and first.to.data_ptr() + size == second.to.data_ptr()
        and first.start + size == second.start
        and _dense(first)
        and _dense(second)
    )


def _joined(first: _Step, second: _Step) -> _Step:
    count = first.to.numel() + second.to.numel()
    to = first.to.as_strided((count,), (1,), first.to.storage_offset())
    return _Step(to, first.dtype, first.start, (count,), (1,))
