"""Copy plan: a traced load as a few large copies, which later versions replay."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from grpo_worker.weightsync.protocol.byte_copies import ByteCopies, Piece
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

    ``batched``: those that a GPU makes in a few launches. ``others``: the other ones, in groups, each with
    whether one call of torch can make all of them.
    ``by_loader``: names of tensors that the model's own loader must load.
    ``storages``: addresses of the parameters' storages when the plan was made.
    """

    steps: tuple[Step, ...]
    batched: ByteCopies | None
    others: tuple[tuple[tuple[Step, ...], bool], ...]
    by_loader: frozenset[str]
    storages: frozenset[int]

    @classmethod
    def of(cls, steps: Iterable[Step], by_loader: Iterable[str] = ()) -> "CopyPlan":
        """Return the plan of ``steps``, with adjacent ones merged."""
        return cls._of(tuple(_merged(list(steps))), frozenset(by_loader))

    @classmethod
    def _of(cls, steps: tuple[Step, ...], by_loader: frozenset[str]) -> "CopyPlan":
        pieces, others = [], []
        for step in steps:
            piece = _piece(step) if step.target.is_cuda else None
            if piece is None:
                others.append(step)
            else:
                pieces.append(piece)
        batched = ByteCopies(pieces, steps[0].target.device) if pieces else None
        return cls(steps, batched, _grouped(others), by_loader, storages(step.target for step in steps))

    def into(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "CopyPlan":
        """Return the plan with other targets: what ``place`` returns for each of them."""
        steps = tuple(replace(step, target=place(step.target)) for step in self.steps)
        return self._of(steps, self.by_loader)

    def replay(self, flat: torch.Tensor) -> None:
        """Copy the bytes of ``flat`` (uint8 [bytes of the bucket]) into the parameters."""
        if self.batched is not None:
            self.batched.launch(source=flat.data_ptr())
        wholes: dict[torch.dtype, torch.Tensor] = {}
        for steps, together in self.others:
            sources = [_source(flat, step, wholes) for step in steps]
            if together:
                torch._foreach_copy_([step.target for step in steps], sources)
                continue
            for step, source in zip(steps, sources, strict=True):
                step.target.copy_(source)


def _grouped(steps: Iterable[Step]) -> tuple[tuple[tuple[Step, ...], bool], ...]:
    """Return the steps of each kind, and whether all are contiguous and of one dtype on each side."""
    by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[Step]] = {}
    for step in map(_in_words, steps):
        by_kind.setdefault(step.kind, []).append(step)
    return tuple((tuple(of_kind), kind[2]) for kind, of_kind in by_kind.items())


def _piece(step: Step) -> Piece | None:
    """Return a copy as rows of bytes, or None if it is none: it changes the dtype or the order."""
    if step.target.dtype != step.dtype:
        return None
    dims: list[tuple[int, int, int]] = []  # from the innermost on: size, strides of source and target
    for dim in reversed(list(zip(step.size, step.stride, step.target.stride(), strict=True))):
        if dims and (dim[1], dim[2]) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = dims[-1][0] * dim[0], dims[-1][1], dims[-1][2]
        elif dim[0] != 1:
            dims.append(dim)
    width, *rows = dims or [(1, 1, 1)]
    if (width[1], width[2]) != (1, 1) or len(rows) > 1:
        return None
    item = step.dtype.itemsize
    count, pitch, target_pitch = rows[0] if rows else (1, 0, 0)
    return Piece(
        step.start, step.target.data_ptr(), count, width[0] * item, pitch * item, target_pitch * item
    )


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
