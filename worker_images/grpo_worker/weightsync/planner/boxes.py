"""Regions from what members know: slices of trainer ranks, and boxes that engine ranks keep. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from grpo_worker.weightsync.planner.regions import BLOCK, Box, Held, Needed, RegionError, Tensor
from grpo_worker.weightsync.protocol.manifest import Slice

SCALES = "_scale_inv"  # suffix of the scales of a tensor in FP8, which travel with its values

Kept = Mapping[str, Sequence[Box]]  # regions of each tensor that an engine rank keeps


def tensor_of(shape: Sequence[int], dtype: str) -> Tensor:
    """Return a tensor as rows and columns."""
    return Tensor(shape[0] if shape else 1, math.prod(shape[1:]), dtype)


def held_regions(layouts: Sequence[Iterable[Slice]]) -> tuple[dict[str, Tensor], list[Held]]:
    """Return the tensors, and the regions that trainer ranks hold; layouts[r]: all slices of rank r.

    Slices that several ranks hold are one region of all of them. Raises RegionError if ranks disagree on a
    tensor, or a slice is cut along another dimension than rows or columns.
    """
    tensors: dict[str, Tensor] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, slices in enumerate(layouts):
        for part in slices:
            if part.name.endswith(SCALES):
                continue
            tensor = tensor_of(part.shape, part.dtype)
            if tensors.setdefault(part.name, tensor) != tensor:
                raise RegionError(f"{part.name}: ranks disagree on its shape or dtype")
            holders.setdefault((part.name, box_of(part, tensor)), []).append(rank)
    return tensors, [Held(name, box, tuple(ranks)) for (name, box), ranks in holders.items()]


def box_of(part: Slice, tensor: Tensor) -> Box:
    """Return the region of a slice. Raises RegionError if it is cut along another dimension than 0 and 1."""
    end = part.offset + part.length
    if part.dim == 0:
        return Box(part.offset, end, 0, tensor.columns)
    if part.dim > 1:
        raise RegionError(f"{part.name}: it is cut along dimension {part.dim}; only 0 and 1 are supported")
    width = math.prod(part.shape[2:])
    return Box(0, tensor.rows, part.offset * width, end * width)


def needed_regions(kept: Mapping[int, Kept], tensors: Mapping[str, Tensor]) -> list[Needed]:
    """Return the regions that engine ranks need; kept[r]: of rank r.

    Ranks that keep the same region need it together. Of a tensor in FP8 whole blocks are needed, of both the
    values and the scales that a rank keeps.
    """
    users: dict[tuple[str, Box], list[int]] = {}
    for rank, of_rank in sorted(kept.items()):
        for name, tensor in tensors.items():
            for box in _boxes_of(name, tensor, of_rank):
                users.setdefault((name, box), []).append(rank)
    return [Needed(name, box, tuple(ranks)) for (name, box), ranks in users.items()]


def _boxes_of(name: str, tensor: Tensor, kept: Kept) -> list[Box]:
    boxes = list(kept.get(name, ()))
    if tensor.scaled:
        boxes += [_scaled_up(box) for box in kept.get(name + SCALES, ())]
        boxes = [_whole_blocks(box, tensor) for box in boxes]
    return disjoint(boxes)


def _scaled_up(box: Box) -> Box:
    return Box(box.top * BLOCK, box.bottom * BLOCK, box.left * BLOCK, box.right * BLOCK)


def _whole_blocks(box: Box, tensor: Tensor) -> Box:
    """Return the smallest box of whole blocks around ``box``, inside of the tensor."""
    bottom, right = (-(-end // BLOCK) * BLOCK for end in (box.bottom, box.right))
    top, left = (start // BLOCK * BLOCK for start in (box.top, box.left))
    return Box(top, min(bottom, tensor.rows), left, min(right, tensor.columns))


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Return boxes without overlaps that cover ``boxes``, in order.

    Boxes that touch along a whole side become one. Boxes that overlap otherwise become the box around both.
    """
    result: list[Box] = []
    for box in sorted(set(boxes)):
        merged = box
        while (other := next((each for each in result if _joins(each, merged)), None)) is not None:
            result.remove(other)
            merged = Box(
                min(merged.top, other.top), max(merged.bottom, other.bottom),
                min(merged.left, other.left), max(merged.right, other.right),
            )  # fmt: skip
        result.append(merged)
    return sorted(result)


def _joins(a: Box, b: Box) -> bool:
    rows_touch = a.top <= b.bottom and b.top <= a.bottom
    columns_touch = a.left <= b.right and b.left <= a.right
    if (a.left, a.right) == (b.left, b.right) and rows_touch:
        return True
    if (a.top, a.bottom) == (b.top, b.bottom) and columns_touch:
        return True
    return a.intersection(b) is not None


def rectangles(begin: int, end: int, line: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield bytes ``begin`` to ``end`` of a tensor: rows, and bytes of a row (top, bottom, left, right)."""
    first, last = -(-begin // line), end // line
    if first > last:  # within one row
        yield last, first, begin - last * line, end - last * line
        return
    if begin < first * line:
        yield first - 1, first, begin - (first - 1) * line, line
    if first < last:
        yield first, last, 0, line
    if last * line < end:
        yield last, last + 1, 0, end - last * line
