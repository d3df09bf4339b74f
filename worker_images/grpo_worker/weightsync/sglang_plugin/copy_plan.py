"""Copy plan: a traced load as a few large copies, which later versions replay."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from grpo_worker.weightsync.sglang_plugin.load_tracer import Copy, LoadTrace

_WORD = torch.int64  # the widest elements


@dataclass(slots=True)
class Step:
    """One copy from a bucket to ``target``, a view of a parameter.

    ``dtype``, ``size``, ``stride``: of the source, which begins at byte ``start`` of the bucket.
    """

    target: torch.Tensor = field(repr=False)
    dtype: torch.dtype
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def kind(self) -> tuple[torch.dtype, torch.dtype, bool]:
        """Dtypes of target and source, and whether both are contiguous."""
        contiguous = self.target.is_contiguous() and self.stride == _strides(self.size)
        return self.target.dtype, self.dtype, contiguous


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies of one bucket.

    ``steps``: steps of one kind follow each other. ``kinds``: end of each kind in ``steps``, and whether one
    launch can copy all of it.
    ``by_loader``: names of tensors that the model's own loader must load.
    ``storages``: addresses of the parameters' storages when the plan was made.
    """

    steps: tuple[Step, ...]
    kinds: tuple[tuple[int, bool], ...]
    by_loader: frozenset[str]
    storages: frozenset[int]

    @classmethod
    def of(cls, steps: Iterable[Step], by_loader: Iterable[str] = ()) -> "CopyPlan":
        """Return the plan of ``steps``, with adjacent ones merged."""
        by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[Step]] = {}
        for step in map(_in_words, _merged(list(steps))):
            by_kind.setdefault(step.kind, []).append(step)
        ordered = [step for of_kind in by_kind.values() for step in of_kind]
        ends = accumulate(map(len, by_kind.values()))
        # One launch copies many tensors, if all are contiguous and of one dtype on each side.
        kinds = tuple((end, kind[2]) for end, kind in zip(ends, by_kind, strict=True))
        targets = storages(step.target for step in ordered)
        return cls(tuple(ordered), kinds, frozenset(by_loader), targets)

    def into(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "CopyPlan":
        """Return the plan with other targets: what ``place`` returns for each of them."""
        steps = tuple(replace(step, target=place(step.target)) for step in self.steps)
        return replace(self, steps=steps, storages=storages(step.target for step in steps))

    def replay(self, flat: torch.Tensor) -> None:
        """Copy the bytes of ``flat`` (uint8 [bytes of the bucket]) into the parameters."""
        wholes: dict[torch.dtype, torch.Tensor] = {}
        first = 0
        for end, together in self.kinds:
            steps, first = self.steps[first:end], end
            sources = [_source(flat, step, wholes) for step in steps]
            if together:
                torch._foreach_copy_([step.target for step in steps], sources)
                continue
            for step, source in zip(steps, sources, strict=True):
                step.target.copy_(source)


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the addresses of the tensors' storages.

    A copy plan stays valid as long as its storages are among those of the model.
    """
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _source(flat: torch.Tensor, step: Step, wholes: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
    """Return the view of the bucket that a step reads. ``wholes``: views of all of it, by dtype."""
    whole = wholes.get(step.dtype)
    if whole is None:
        elements = len(flat) // step.dtype.itemsize
        whole = wholes[step.dtype] = flat[: elements * step.dtype.itemsize].view(step.dtype)
    # as_strided counts from the start of the storage, and the bucket may begin anywhere in it.
    first = whole.storage_offset() + step.start // step.dtype.itemsize
    return whole.as_strided(step.size, step.stride, first)


def make_copy_plan(
    load_trace: LoadTrace, flat: torch.Tensor, partners: Iterable[Sequence[str]] = ()
) -> CopyPlan:
    """Make the copy plan of the bucket ``flat`` from the trace of its load.

    ``partners``: groups of names that the loader loads only together; if one needs the loader, all do.
    """
    by_loader = set(load_trace.unexplained)
    for group in partners:
        if by_loader & set(group):
            by_loader |= set(group)
    steps: list[Step] = []
    for name, copies in load_trace.copies.items():
        if name not in by_loader:
            steps.extend(_step(copy, flat) for copy in copies)
    return CopyPlan.of(steps, by_loader)


def by_module(names: Iterable[str]) -> list[list[str]]:
    """Group the tensors of each module: a loader that fuses some of them needs all at once."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rsplit(".", 2)[0], []).append(name)
    return list(modules.values())


def _step(copy: Copy, flat: torch.Tensor) -> Step:
    start = copy.source.data_ptr() - flat.data_ptr()
    return Step(copy.target, copy.source.dtype, start, tuple(copy.source.shape), copy.source.stride())


def _merged(steps: list[Step]) -> list[Step]:
    """Merge steps that are adjacent in source and target, for example all experts of a layer."""
    result: list[Step] = []
    for step in sorted(steps, key=lambda s: (s.target.data_ptr(), s.start)):
        if result and _continues(result[-1], step):
            result[-1] = _joined(result[-1], step)
        else:
            result.append(step)
    return result


def _in_words(step: Step) -> Step:
    """Return a contiguous copy as one of words of 8 bytes, where there are only such.

    A launch that copies many tensors moves a number of elements at a time: with single bytes it would take
    three times as long.
    """
    place = step.target.storage_offset() * step.target.itemsize
    ends = place, step.start, step.target.nbytes
    if not _contiguous(step) or step.target.dtype != step.dtype or any(end % _WORD.itemsize for end in ends):
        return step
    target = step.target.view(-1).view(_WORD)
    return Step(target, _WORD, step.start, tuple(target.shape), (1,))


def _contiguous(step: Step) -> bool:
    return step.kind[2]


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(size, device="meta").stride()


def _continues(first: Step, second: Step) -> bool:
    """Return whether ``second`` directly follows ``first`` in source and target."""
    size = first.target.numel() * first.dtype.itemsize
    return (
        first.target.dtype == second.target.dtype == first.dtype == second.dtype
        and first.target.untyped_storage().data_ptr() == second.target.untyped_storage().data_ptr()
        and first.target.data_ptr() + size == second.target.data_ptr()
        and first.start + size == second.start
        and _contiguous(first)
        and _contiguous(second)
    )


def _joined(first: Step, second: Step) -> Step:
    count = first.target.numel() + second.target.numel()
    target = first.target.as_strided((count,), (1,), first.target.storage_offset())
    return Step(target, first.dtype, first.start, (count,), (1,))
