"""Copy plan: a traced load as a few large copies, which later versions replay."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from grpo_worker.weightsync.sglang_plugin.load_tracer import Copy, LoadTrace


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


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies of one bucket.

    ``by_loader``: names of tensors that the model's own loader must load.
    ``storages``: addresses of the parameters' storages when the plan was made.
    """

    steps: tuple[Step, ...]
    by_loader: frozenset[str]
    storages: frozenset[int]

    @classmethod
    def of(cls, steps: Iterable[Step], by_loader: Iterable[str] = ()) -> "CopyPlan":
        """Return the plan of ``steps``, with adjacent ones merged."""
        merged_steps = tuple(_merged(list(steps)))
        targets = storages(step.target for step in merged_steps)
        return cls(merged_steps, frozenset(by_loader), targets)

    def replay(self, flat: torch.Tensor) -> None:
        """Copy the bytes of ``flat`` (uint8 [bytes of the bucket]) into the parameters."""
        pairs = [(step.target, _source(flat, step)) for step in self.steps]
        plain = [(target, source) for target, source in pairs if _plain(target, source)]
        if plain:
            # One launch copies many tensors, if each is contiguous and of one dtype on both sides.
            torch._foreach_copy_([target for target, _ in plain], [source for _, source in plain])
        for target, source in pairs:
            if not _plain(target, source):
                target.copy_(source)


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the addresses of the tensors' storages.

    A copy plan stays valid as long as its storages are among those of the model.
    """
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()


def _source(flat: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the view of the bucket that a step reads."""
    elements = len(flat) // step.dtype.itemsize
    whole = flat[: elements * step.dtype.itemsize].view(step.dtype)
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


def _contiguous(step: Step) -> bool:
    contiguous_stride = torch.empty(step.size, device="meta").stride()
    return step.target.is_contiguous() and step.stride == contiguous_stride


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
