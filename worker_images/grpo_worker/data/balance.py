"""Partitioning of sequences into parts of similar total length (pure)."""

import heapq
from collections.abc import Sequence
from itertools import count


def balanced(lengths: Sequence[int], parts: int, equal_size: bool = False) -> list[list[int]]:
    """Split the indices of ``lengths`` into ``parts`` groups with similar sums.

    Uses the largest differencing method (Karmarkar and Karp 1983). ``equal_size``: group sizes differ by at
    most one. Indices within a group, and groups by their first index, are sorted, so that the result does
    not depend on ties. Raises ValueError for parts < 1.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    groups = _equal_size(lengths, parts) if equal_size else _differencing(lengths, parts)
    return sorted((sorted(group) for group in groups), key=lambda group: group[:1])


def _differencing(lengths: Sequence[int], parts: int) -> list[list[int]]:
    tie = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths):
        state = [(length, [index]), *((0, []) for _ in range(parts - 1))]
        heap.append((-length, next(tie), state))
    heapq.heapify(heap)
    if not heap:
        return [[] for _ in range(parts)]
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # Joining the fullest part of one with the emptiest of the other shrinks the difference most.
        merged = [(a + c, b + d) for (a, b), (c, d) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda item: -item[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(tie), merged))
    return [indices for _, indices in heap[0][2]]


def _equal_size(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Assign sequences in rounds of one per part, longest first, to the emptiest part."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for start in range(0, len(order), parts):
        emptiest = sorted(range(parts), key=lambda part: (sums[part], part))
        for part, index in zip(emptiest, order[start : start + parts], strict=False):
            groups[part].append(index)
            sums[part] += lengths[index]
    return groups


def within_budget(
    lengths: Sequence[int], each: int, gpus: int = 1, field: str = "maxTokensPerGpu"
) -> list[list[int]]:
    """Return balanced groups of at most ``each`` x ``gpus`` tokens, as few as balancing allows.

    ``gpus``: context-parallel ranks, which share a group. ``field``: of the trainer, which has ``each``.
    Raises ValueError for a longer sequence.
    """
    budget, shared = each * gpus, f" on each of {gpus} context-parallel GPUs" if gpus > 1 else ""
    if lengths and max(lengths) > budget:
        raise ValueError(
            f"a sequence has {max(lengths)} tokens, trainer.{field} is {each}{shared}: raise it, so "
            "that data.promptLength + data.responseLength fit"
        )
    parts = max(1, -(-sum(lengths) // budget))
    while True:
        groups = balanced(lengths, parts)
        if all(sum(lengths[i] for i in group) <= budget for group in groups):
            return groups
        parts += 1
