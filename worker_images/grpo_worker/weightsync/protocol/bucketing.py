"""Assignment of tensors to buckets. Pure."""

import re
from collections.abc import Mapping, Sequence

from grpo_worker.weightsync.protocol.tiling import TensorPlan

# SGLang fuses these pairs and drops one half if its partner is not in the same request.
_PARTNERS = {
    f"self_attn.kv_a_proj_with_mqa.{kind}": f"self_attn.q_a_proj.{kind}"
    for kind in ("weight", "weight_scale_inv")
}
_MIN_SHARE = 64 << 20  # bytes of one trainer rank in a bucket; much smaller messages waste bandwidth

_Unit = list[str]  # names that must be in the same bucket


def buckets(tensors: Sequence[TensorPlan], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Group tensor names into buckets of at most ``limit`` bytes; fused partners stay together.

    ``sizes``: bytes of each tensor. A unit larger than the limit gets a bucket of its own. Each bucket has
    tensors of several trainer ranks, so that the ranks send in parallel, and one rank's tensors are adjacent
    in it, so that they form one message.
    """
    holders = {tensor.name: tuple(sorted({rank for rank, _ in tensor.pieces})) for tensor in tensors}
    queues = _queues(holders)
    queues_per_bucket = max(1, limit // _MIN_SHARE)
    result: list[list[str]] = []
    while queues:
        names = _fill(queues[:queues_per_bucket], sizes, limit)
        # A partner can have other holders than its unit: sort, so that it does not split a rank's message.
        result.append(sorted(names, key=holders.__getitem__))
        queues = [queue for queue in queues if queue]
    return result


def _queues(holders: Mapping[str, tuple[int, ...]]) -> list[list[_Unit]]:
    """Return the units of each set of holders, in loading order."""
    queues: dict[tuple[int, ...], list[_Unit]] = {}
    for unit in _units(sorted(holders, key=_order)):
        queues.setdefault(holders[unit[0]], []).append(unit)
    return [queues[key] for key in sorted(queues)]


def _fill(queues: Sequence[list[_Unit]], sizes: dict[str, int], limit: int) -> list[str]:
    """Pop units from the front of each queue until its share of the bucket is used up."""
    names: list[str] = []
    used, share = 0, limit // len(queues)
    for number, queue in enumerate(queues, start=1):
        while queue:
            size = sum(sizes[name] for name in queue[0])
            if names and used + size > share * number:
                break
            names.extend(queue.pop(0))
            used += size
    return names


_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.(.*)")


def _order(name: str) -> tuple[str, str, bool, int, str]:
    """Return a sort key that orders experts as in the engine's memory, where one copy then loads a layer."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name, "", False, 0, ""
    prefix, number, half, kind = match.groups()
    return prefix, kind, half == "down", int(number), half


def _units(names: Sequence[str]) -> list[_Unit]:
    """Group each name with its fused partner, if it has one."""
    units: list[_Unit] = []
    grouped: set[str] = set()
    present = set(names)
    for name in names:
        if name in grouped:
            continue
        unit = [name]
        for suffix, partner in _PARTNERS.items():
            other = name.removesuffix(suffix) + partner
            if name.endswith(suffix) and other in present:
                unit.append(other)
        grouped.update(unit)
        units.append(unit)
    return units
