"""Load tracer: trace how a model loads a bucket, to learn which source bytes end up in which parameters.

``load_weights`` gets tensors of a subclass that remember which part of which buffer they are. Views of them
remember it too, and each copy of one into a parameter is recorded. Other computations on a source cannot be
replayed by copies; those tensors are left to the model's own loader.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

_VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "chunk", "detach", "expand", "narrow", "permute", "reshape", "select",
        "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
        "_unsafe_view",
    )
)  # fmt: skip
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy from ``source`` (view of a buffer) to ``target`` (view of a parameter), of equal shapes."""

    target: torch.Tensor = field(repr=False)
    source: torch.Tensor = field(repr=False)


@dataclass
class LoadTrace:
    """Record of one load.

    ``copies``: by name of the source tensor.
    ``unexplained``: names whose load is not only copies, each with the reason.
    """

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.setdefault(name, []).append(Copy(target, source))

    def mark_unexplained(self, names: Sequence[str], reason: str) -> None:
        self.unexplained.update(dict.fromkeys(names, reason))


@dataclass(frozen=True, slots=True)
class SourcePart:
    """View of one source tensor that makes up part of a concatenated tensor.

    It is at ``start`` to ``start + view.shape[dim]`` along ``dim``.
    """

    name: str
    view: torch.Tensor
    dim: int
    start: int


class Source(torch.Tensor):
    """Tensor that remembers its origin: one view of a source tensor, or a concatenation of several.

    ``elements``: plain tensor of the same shape with the values.
    """

    elements: torch.Tensor
    parts: tuple[SourcePart, ...]
    load_trace: LoadTrace

    @staticmethod
    def __new__(
        cls: type["Source"], elements: torch.Tensor, parts: tuple[SourcePart, ...], load_trace: LoadTrace
    ) -> "Source":
        made: Source = torch.Tensor._make_wrapper_subclass(
            cls, elements.size(), strides=elements.stride(), storage_offset=elements.storage_offset(),
            dtype=elements.dtype, device=elements.device,
        )  # fmt: skip
        made.elements, made.parts, made.load_trace = elements, parts, load_trace
        return made

    @classmethod
    def of(cls, name: str, view: torch.Tensor, load_trace: LoadTrace) -> "Source":
        """Return a whole source tensor."""
        return cls(view, (SourcePart(name, view, 0, 0),), load_trace)

    def is_view(self) -> bool:
        """Return whether this is a view of one source tensor, without a copy of its elements."""
        return len(self.parts) == 1 and self.parts[0].view is self.elements

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = list(_sources((args, kwargs)))
        plain = tree_map(lambda x: x.elements if isinstance(x, Source) else x, (args, kwargs))
        handler = _handler(func, args, sources)
        return handler(func, args, sources, lambda: func(*plain[0], **plain[1]))


def _sources(tree: Any) -> Iterator[Source]:
    leaves, _ = tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Source))


_Call = Callable[[], Any]  # runs the operation on plain tensors


def _handler(func: Any, args: tuple[Any, ...], sources: list[Source]) -> Callable[..., Any]:
    """Choose the function that handles an operation on sources."""
    operation = func.overloadpacket
    if operation in _VIEWS and sources[0].is_view():
        return _on_view
    if operation is _aten.detach:
        return _on_detach
    if operation is _aten.cat and all(isinstance(x, Source) and x.is_view() for x in args[0]):
        return _on_cat
    if operation is _aten._to_copy and sources[0].is_view():
        return _on_cast
    if operation is _aten.copy_ and isinstance(args[1], Source) and not isinstance(args[0], Source):
        return _on_copy
    return _on_other


def _on_view(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    source = sources[0]

    def wrap(elements: torch.Tensor) -> Source:
        return Source(elements, (SourcePart(source.parts[0].name, elements, 0, 0),), source.load_trace)

    result = call()
    if isinstance(result, torch.Tensor):
        if result.untyped_storage().data_ptr() != source.elements.untyped_storage().data_ptr():
            return _on_other(func, args, sources, lambda: result)  # a reshape that had to copy
        return wrap(result)
    return [wrap(piece) for piece in result]


def _on_detach(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    return Source(sources[0].elements, sources[0].parts, sources[0].load_trace)


def _on_cat(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    whole = call()
    dim = (args[1] if len(args) > 1 else 0) % whole.dim()
    parts, start = [], 0
    for source in sources:
        parts.append(SourcePart(source.parts[0].name, source.elements, dim, start))
        start += source.elements.shape[dim]
    return Source(whole, tuple(parts), sources[0].load_trace)


def _on_cast(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    """Keep the parts: a copy into a parameter of the new dtype converts the elements anyway."""
    return Source(call(), sources[0].parts, sources[0].load_trace)


def _on_copy(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    target, source = args[0], args[1]
    cast_before = any(part.view.dtype != source.dtype for part in source.parts)
    if target.shape != source.shape or (cast_before and target.dtype != source.dtype):
        return _on_other(func, args, sources, call)
    for part in source.parts:
        part_target = target.detach()
        if len(source.parts) > 1:
            part_target = part_target.narrow(part.dim, part.start, part.view.shape[part.dim])
        source.load_trace.add(part.name, part_target, part.view)
    call()
    return target


def _on_other(func: Any, args: Any, sources: list[Source], call: _Call) -> Any:
    for source in sources:
        source.load_trace.mark_unexplained([part.name for part in source.parts], str(func))
    return call()


def trace_load(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any], tensors: Sequence[tuple[str, torch.Tensor]]
) -> LoadTrace:
    """Load ``tensors`` (name, view of a buffer) by ``load``, and return the trace.

    A name is unexplained if a target of its copies holds other bytes afterwards. Raises the error of ``load``
    if it cannot load the plain tensors either.
    """
    load_trace = LoadTrace()
    sources = [(name, Source.of(name, tensor, load_trace)) for name, tensor in tensors]
    try:
        load(list(sources))
    except Exception as error:  # noqa: BLE001 - a model's loader may need real memory and raise anything
        load(list(tensors))
        load_trace.mark_unexplained([name for name, _ in tensors], f"{type(error).__name__}: {error}")
    for name, copies in load_trace.copies.items():
        if not all(_target_equals_source(copy) for copy in copies):
            load_trace.mark_unexplained([name], "another tensor was written to the same place")
    for name in load_trace.unexplained:
        load_trace.copies.pop(name, None)
    return load_trace


def _target_equals_source(copy: Copy) -> bool:
    """Compare bytes, not values: NaN is unequal to itself."""
    expected = copy.source.to(copy.target.device, copy.target.dtype).contiguous().view(torch.uint8)
    return torch.equal(copy.target.contiguous().view(torch.uint8), expected)
