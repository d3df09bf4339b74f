"""Who sends which part to whom: balanced over network interfaces, once to each node (pure).

Every GPU, of trainers and of engines, has an interface of its own. A node of engines takes a part in
once, on one of its GPUs, and hands it on to the others inside.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from grpo_worker.weightsync.planner.regions import Atom, Held, Tensor, Wanted

_CHOICES = 256  # (bundle, node) for each sender
Node = Callable[[int], int]  # GPU of an engine -> its node


@dataclass(frozen=True, slots=True)
class Transfer:
    """Parts (their numbers) that travel together: from a trainer rank to the GPU where they land, which
    hands them on to ``siblings`` of its node."""

    atoms: tuple[int, ...]
    nbytes: int
    sender: int
    landing: int
    siblings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """``pairs``: (sender, landing) -> its transfers, in the order in which the sender serves them.
    ``sent``, ``received``: bytes of each interface."""

    pairs: dict[tuple[int, int], list[Transfer]]
    sent: dict[int, int]
    received: dict[int, int]

    @property
    def busiest(self) -> int:
        """Bytes of the busiest interface: what the sync cannot be faster than."""
        return max([*self.sent.values(), *self.received.values()], default=0)


def route(atoms: Sequence[Atom], node: Node, bundle: int = 16 << 20) -> Routes:
    """Choose a sender and a landing place for every (part, node).

    Parts of the same senders and receivers travel together: all of them where there is no choice, and
    ``bundle`` bytes or more at a time where there is. Those with the fewest senders to choose from come
    first, and of those the largest: what is left over evens the load out.
    """
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    found: list[Transfer] = []
    for ranks, gpus, parts in _alike(atoms):
        places = _by_node(gpus, node)
        senders = _Least(ranks, sent)
        landings = [(place, _Least(place, received)) for place in places]
        for some in _bundles([atoms[part].nbytes for part in parts], parts, len(ranks), places, bundle):
            nbytes = sum(atoms[part].nbytes for part in some)
            for place, landing in landings:
                to = landing.take(nbytes)
                siblings = tuple(gpu for gpu in place if gpu != to)
                found.append(Transfer(some, nbytes, senders.take(nbytes), to, siblings))
    return Routes(_in_turns(found), dict(sent), dict(received))


class _Least:
    """Candidates, of which the one with the least load is taken each time."""

    def __init__(self, candidates: Iterable[int], load: dict[int, int]) -> None:
        self._load = load
        self._heap = [(load[candidate], candidate) for candidate in candidates]
        heapify(self._heap)

    def take(self, nbytes: int) -> int:
        load, candidate = self._heap[0]
        heapreplace(self._heap, (load + nbytes, candidate))
        self._load[candidate] = load + nbytes
        return candidate


def _alike(atoms: Sequence[Atom]) -> list[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """(ranks, gpus, numbers of the parts) in the order in which they are given a way."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for index, atom in enumerate(atoms):
        alike[atom.ranks, atom.gpus].append(index)
    sized = [(sum(atoms[part].nbytes for part in parts), *who, parts) for who, parts in alike.items()]
    ordered = sorted(sized, key=lambda group: (len(group[1]), -group[0], group[3][0]))
    return [(ranks, gpus, parts) for _, ranks, gpus, parts in ordered]


def _bundles(
    sizes: Sequence[int], parts: Sequence[int], senders: int, places: Sequence[tuple[int, ...]], limit: int
) -> list[tuple[int, ...]]:
    if senders == 1 and all(len(place) == 1 for place in places):
        return [tuple(parts)]
    # Each goes to every node: more choices than these would balance no better.
    return _split(sizes, parts, max(limit, sum(sizes) * len(places) // (_CHOICES * senders)))


def _split(sizes: Sequence[int], parts: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    bundles: list[list[int]] = []
    used = limit
    for part, size in zip(parts, sizes, strict=True):
        if used + size > limit:
            bundles.append([])
            used = 0
        bundles[-1].append(part)
        used += size
    return [tuple(bundle) for bundle in bundles]


def _by_node(gpus: Iterable[int], node: Node) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for gpu in gpus:
        nodes[node(gpu)].append(gpu)
    return [tuple(found) for _, found in sorted(nodes.items())]


def _in_turns(transfers: Iterable[Transfer]) -> dict[tuple[int, int], list[Transfer]]:
    """Each sender starts with another receiver and goes round from there, so that no receiver is served
    by all at once."""
    pairs: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        pairs[transfer.sender, transfer.landing].append(transfer)
    receivers = {gpu: place for place, gpu in enumerate(sorted({landing for _, landing in pairs}))}
    senders = {rank: place for place, rank in enumerate(sorted({sender for sender, _ in pairs}))}

    def turn(pair: tuple[int, int]) -> tuple[int, int]:
        sender, landing = pair
        return senders[sender], (receivers[landing] - senders[sender]) % len(receivers)

    return {pair: sorted(pairs[pair], key=lambda t: t.atoms) for pair in sorted(pairs, key=turn)}


def plan_id(tensors: Mapping[str, Tensor], held: Iterable[Held], wanted: Iterable[Wanted]) -> str:
    """Names what the routes follow from: tensors, layouts and engines, in whatever order."""
    found = hashlib.sha256()
    for part in (
        sorted(tensors.items(), key=lambda item: item[0]),
        sorted(map(repr, held)),
        sorted(map(repr, wanted)),
    ):
        found.update(repr(part).encode())
    return found.hexdigest()[:16]
