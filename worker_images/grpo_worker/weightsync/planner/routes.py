"""Routes: sender and receiver of each atom, balanced over network interfaces. Pure.

Every GPU, of trainers and of engines, has its own interface. Each node of engines receives an atom once, on
one of its GPUs, which forwards it to the other GPUs of the node.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from grpo_worker.weightsync.planner.regions import Atom, Held, Needed, Tensor

_CHOICES = 256  # number of (bundle, node) pairs for each sender; more would not improve the balance
Node = Callable[[int], int]  # GPU of an engine -> its node


@dataclass(frozen=True, slots=True)
class Route:
    """Atoms (by index) that a trainer rank sends to one GPU.

    ``landing``: GPU that receives them over the network. ``siblings``: GPUs of its node that it forwards to.
    ``counted``: of all routes of these atoms, this one is counted in the sum of the engine's bytes.
    """

    atoms: tuple[int, ...]
    nbytes: int
    sender: int
    landing: int
    siblings: tuple[int, ...]
    counted: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """All routes of an update.

    ``pairs``: (sender, landing) -> its routes, in the order in which the sender serves them.
    ``sent``, ``received``: bytes of each interface.
    """

    pairs: dict[tuple[int, int], list[Route]]
    sent: dict[int, int]
    received: dict[int, int]

    @property
    def busiest(self) -> int:
        """Bytes of the busiest interface; the update cannot be faster than this interface."""
        return max([*self.sent.values(), *self.received.values()], default=0)


def route(
    atoms: Sequence[Atom], node: Node, bundle: int = 16 << 20, sent: Mapping[int, int] | None = None
) -> Routes:
    """Choose a sender and a landing GPU for every (atom, node).

    ``sent``: bytes that trainer ranks already send to other engines; the result's ``sent`` includes them.

    Atoms with the same senders and receivers are bundled: all of them if there is no choice, otherwise in
    bundles of at least ``bundle`` bytes. Groups with the fewest senders come first, and among them the
    largest, so that the later groups can even out the load.
    """
    sent = defaultdict(int, sent or {})
    received: dict[int, int] = defaultdict(int)
    routes: list[Route] = []
    for ranks, gpus, indices in _grouped(atoms):
        nodes = _by_node(gpus, node)
        senders = _LeastLoaded(ranks, sent)
        landings = [(members, _LeastLoaded(members, received)) for members in nodes]
        for some in _bundles([atoms[i].nbytes for i in indices], indices, len(ranks), nodes, bundle):
            nbytes = sum(atoms[i].nbytes for i in some)
            for number, (members, landing) in enumerate(landings):
                target = landing.assign(nbytes)
                siblings = tuple(gpu for gpu in members if gpu != target)
                routes.append(Route(some, nbytes, senders.assign(nbytes), target, siblings, number == 0))
    return Routes(_staggered(routes), dict(sent), dict(received))


class _LeastLoaded:
    """Assigns bytes to the candidate with the least load."""

    def __init__(self, candidates: Iterable[int], load: dict[int, int]) -> None:
        self._load = load
        self._heap = [(load[candidate], candidate) for candidate in candidates]
        heapify(self._heap)

    def assign(self, nbytes: int) -> int:
        """Add ``nbytes`` to the least loaded candidate and return it."""
        load, candidate = self._heap[0]
        heapreplace(self._heap, (load + nbytes, candidate))
        self._load[candidate] = load + nbytes
        return candidate


def _grouped(atoms: Sequence[Atom]) -> list[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """Return (ranks, gpus, indices of the atoms) in the order in which routes are chosen."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for index, atom in enumerate(atoms):
        groups[atom.ranks, atom.gpus].append(index)
    sized = [(sum(atoms[i].nbytes for i in indices), *key, indices) for key, indices in groups.items()]
    ordered = sorted(sized, key=lambda group: (len(group[1]), -group[0], group[3][0]))
    return [(ranks, gpus, indices) for _, ranks, gpus, indices in ordered]


def _bundles(
    sizes: Sequence[int], indices: Sequence[int], senders: int, nodes: Sequence[tuple[int, ...]], limit: int
) -> list[tuple[int, ...]]:
    if senders == 1 and all(len(members) == 1 for members in nodes):
        return [tuple(indices)]
    # Each bundle is sent to every node.
    return _split(sizes, indices, max(limit, sum(sizes) * len(nodes) // (_CHOICES * senders)))


def _split(sizes: Sequence[int], indices: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    bundles: list[list[int]] = []
    used = limit
    for index, size in zip(indices, sizes, strict=True):
        if used + size > limit:
            bundles.append([])
            used = 0
        bundles[-1].append(index)
        used += size
    return [tuple(bundle) for bundle in bundles]


def _by_node(gpus: Iterable[int], node: Node) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for gpu in gpus:
        nodes[node(gpu)].append(gpu)
    return [tuple(members) for _, members in sorted(nodes.items())]


def _staggered(routes: Iterable[Route]) -> dict[tuple[int, int], list[Route]]:
    """Order the routes so that each sender starts with another receiver.

    From there each sender goes round robin, so that senders do not serve the same receiver at the same time.
    """
    pairs: dict[tuple[int, int], list[Route]] = defaultdict(list)
    for each in routes:
        pairs[each.sender, each.landing].append(each)
    receivers = {gpu: index for index, gpu in enumerate(sorted({landing for _, landing in pairs}))}
    senders = {rank: index for index, rank in enumerate(sorted({sender for sender, _ in pairs}))}

    def order(pair: tuple[int, int]) -> tuple[int, int]:
        sender, landing = pair
        return senders[sender], (receivers[landing] - senders[sender]) % len(receivers)

    return {pair: sorted(pairs[pair], key=lambda r: r.atoms) for pair in sorted(pairs, key=order)}


def plan_id(tensors: Mapping[str, Tensor], held: Iterable[Held], needed: Iterable[Needed]) -> str:
    """Return a hash of everything the routes follow from, independent of its order."""
    sha = hashlib.sha256()
    for part in (
        sorted(tensors.items(), key=lambda item: item[0]),
        sorted(map(repr, held)),
        sorted(map(repr, needed)),
    ):
        sha.update(repr(part).encode())
    return sha.hexdigest()[:16]
