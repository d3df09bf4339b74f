"""Which tensors travel together (pure)."""

import re
from collections.abc import Mapping, Sequence

from grpo_worker.weightsync.protocol.tiling import TensorPlan

# SGLang fuses these pairs and drops a half that arrives in another request than its partner.
_PARTNERS = {
    f"self_attn.kv_a_proj_with_mqa.{kind}": f"self_attn.q_a_proj.{kind}"
    for kind in ("weight", "weight_scale_inv")
}
_SHARE = 64 << 20  # bytes of one trainer rank in a bucket; much smaller messages waste the wire

_Unit = list[str]


def buckets(tensors: Sequence[TensorPlan], sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Group tensor names into buckets of at most ``limit`` bytes; partners stay together.

    sizes: bytes of each tensor. A unit larger than the limit gets a bucket of its own. Tensors of one
    trainer rank stand together in a bucket, and several ranks have a share in it, so that they send side by
    side and what one sends is one piece.
    """
    holders = {tensor.name: tuple(sorted({rank for rank, _ in tensor.pieces})) for tensor in tensors}
    queues = _queues(holders)
    at_once = max(1, limit // _SHARE)
    result: list[list[str]] = []
    while queues:
        taking = queues[:at_once]
        # Also a partner that others hold must not stand between tensors of one rank.
        result.append(sorted(_fill(taking, sizes, limit), key=holders.__getitem__))
        queues = [queue for queue in queues if queue]
    return result


def _queues(holders: Mapping[str, tuple[int, ...]]) -> list[list[_Unit]]:
    """Units by the ranks that hold them, in order."""
    found: dict[tuple[int, ...], list[_Unit]] = {}
    for unit in _units(sorted(holders, key=_order)):
        found.setdefault(holders[unit[0]], []).append(unit)
    return [found[key] for key in sorted(found)]


def _fill(queues: Sequence[list[_Unit]], sizes: dict[str, int], limit: int) -> list[str]:
    """Take from the front of each queue as much as its share of a bucket allows."""
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
    """Experts stand as in the engine's memory, so that those of a layer are copied as one piece."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name, "", False, 0, ""
    prefix, number, half, kind = match.groups()
    return prefix, kind, half == "down", int(number), half


def _units(names: Sequence[str]) -> list[_Unit]:
    units: list[_Unit] = []
    taken: set[str] = set()
    present = set(names)
    for name in names:
        if name in taken:
            continue
        unit = [name]
        for suffix, partner in _PARTNERS.items():
            other = name.removesuffix(suffix) + partner
            if name.endswith(suffix) and other in present:
                unit.append(other)
        taken.update(unit)
        units.append(unit)
    return units
