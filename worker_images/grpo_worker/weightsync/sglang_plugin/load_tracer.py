"""Watch a model load its weights once, to learn which bytes of the sources end up where.

The sources are given to ``load_weights`` as tensors that know which piece of which buffer they are:
views of them know it too, and a copy of one into a parameter is written down. Whatever else is
computed from a source cannot be repeated by copying, and is left to the model's own loader.
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
    """``to`` (view of a parameter) takes the elements of ``source`` (view of a buffer), same shape."""

    to: torch.Tensor = field(repr=False)
    source: torch.Tensor = field(repr=False)


@dataclass
class LoadTrace:
    """What was seen: copies by source name, and the names that copies do not explain."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    unexplained: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.setdefault(name, []).append(Copy(to, source))

    def give_up(self, names: Sequence[str], reason: str) -> None:
        self.unexplained.update(dict.fromkeys(names, reason))


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``start + view.shape[dim]`` of a tensor made of several sources."""

    name: str
    view: torch.Tensor
    dim: int
    start: int


class Source(torch.Tensor):
    """A piece of a buffer, or several put together. ``elements``: [shape], the elements themselves."""

    elements: torch.Tensor
    parts: tuple[Part, ...]
    load_trace: LoadTrace

    @staticmethod
    def __new__(cls, elements: torch.Tensor, parts: tuple[Part, ...], load_trace: LoadTrace) -> "Source":
        made: Source = torch.Tensor._make_wrapper_subclass(
            cls, elements.size(), strides=elements.stride(), storage_offset=elements.storage_offset(),
            dtype=elements.dtype, device=elements.device,
        )  # fmt: skip
        made.elements, made.parts, made.load_trace = elements, parts, load_trace
        return made

    @classmethod
    def of(cls, name: str, view: torch.Tensor, load_trace: LoadTrace) -> "Source":
        """The whole of a source tensor."""
        return cls(view, (Part(name, view, 0, 0),), load_trace)

    def is_view(self) -> bool:
        """Is it a piece of one source, with the elements where they were?"""
        return len(self.parts) == 1 and self.parts[0].view is self.elements

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = list(_sources((args, kwargs)))
        plain = tree_map(lambda x: x.elements if isinstance(x, Source) else x, (args, kwargs))
        handler = _handler(func, args, found)
        return handler(func, args, found, lambda: func(*plain[0], **plain[1]))


def _sources(tree: Any) -> Iterator[Source]:
    leaves, _ = tree_flatten(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Source))


_Call = Callable[[], Any]


def _handler(func: Any, args: tuple[Any, ...], found: list[Source]) -> Callable[..., Any]:
    operation = func.overloadpacket
    if operation in _VIEWS and found[0].is_view():
        return _on_view
    if operation is _aten.detach:
        return _on_detach
    if operation is _aten.cat and all(isinstance(x, Source) and x.is_view() for x in args[0]):
        return _on_cat
    if operation is _aten._to_copy and found[0].is_view():
        return _on_cast
    if operation is _aten.copy_ and isinstance(args[1], Source) and not isinstance(args[0], Source):
        return _on_copy
    return _on_anything_else


def _on_view(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    source = found[0]

    def again(elements: torch.Tensor) -> Source:
        return Source(elements, (Part(source.parts[0].name, elements, 0, 0),), source.load_trace)

    result = call()
    if isinstance(result, torch.Tensor):
        if result.untyped_storage().data_ptr() != source.elements.untyped_storage().data_ptr():
            return _on_anything_else(func, args, found, lambda: result)  # a reshape that had to copy
        return again(result)
    return [again(piece) for piece in result]


def _on_detach(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    return Source(found[0].elements, found[0].parts, found[0].load_trace)


def _on_cat(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    whole = call()
    dim = (args[1] if len(args) > 1 else 0) % whole.dim()
    parts, start = [], 0
    for source in found:
        parts.append(Part(source.parts[0].name, source.elements, dim, start))
        start += source.elements.shape[dim]
    return Source(whole, tuple(parts), found[0].load_trace)


def _on_cast(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    """The elements as another type; a copy into a parameter of that type converts them by itself."""
    return Source(call(), found[0].parts, found[0].load_trace)


def _on_copy(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    to, source = args[0], args[1]
    converted_before = any(part.view.dtype != source.dtype for part in source.parts)
    if to.shape != source.shape or (converted_before and to.dtype != source.dtype):
        return _on_anything_else(func, args, found, call)
    for part in source.parts:
        here = to.detach()
        if len(source.parts) > 1:
            here = here.narrow(part.dim, part.start, part.view.shape[part.dim])
        source.load_trace.add(part.name, here, part.view)
    call()
    return to


def _on_anything_else(func: Any, args: Any, found: list[Source], call: _Call) -> Any:
    for source in found:
        source.load_trace.give_up([part.name for part in source.parts], str(func))
    return call()


def record(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any], tensors: Sequence[tuple[str, torch.Tensor]]
) -> LoadTrace:
    """Let ``load`` take ``tensors`` (name, view of a buffer), and say what it copied where.

    The weights are loaded when this returns. Copies whose place holds something else in the end are
    among the unexplained. Raises what ``load`` raises when it cannot take them in any form.
    """
    load_trace = LoadTrace()
    sources = [(name, Source.of(name, tensor, load_trace)) for name, tensor in tensors]
    try:
        load(list(sources))
    except Exception as error:  # e.g. a loader that needs real memory
        load(list(tensors))
        load_trace.give_up([name for name, _ in tensors], f"{type(error).__name__}: {error}")
    for name, copies in load_trace.copies.items():
        if not all(_holds(copy) for copy in copies):
            load_trace.give_up([name], "another tensor was written to the same place")
    for name in load_trace.unexplained:
        load_trace.copies.pop(name, None)
    return load_trace


def _holds(copy: Copy) -> bool:
    """Bitwise: NaN is a value like any other."""
    wanted = copy.source.to(copy.to.dtype).contiguous().view(torch.uint8)
    return torch.equal(copy.to.contiguous().view(torch.uint8), wanted)
