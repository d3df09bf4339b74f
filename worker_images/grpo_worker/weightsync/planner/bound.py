"""The least that the busiest interface must carry, whatever the routes: a linear program (pure).

Needs scipy, which the images do not: nothing but measurements asks for it.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from grpo_worker.weightsync.planner.regions import Atom
from grpo_worker.weightsync.planner.routes import Node


def lower_bound(atoms: Sequence[Atom], node: Node) -> float:
    """Bytes. Parts may be split at will between their possible senders and, apart from that, between the
    GPUs of a node where they may land."""
    leaving: dict[tuple[int, ...], int] = defaultdict(int)
    landing: dict[tuple[int, ...], int] = defaultdict(int)
    for atom in atoms:
        nodes: dict[int, list[int]] = defaultdict(list)
        for gpu in atom.gpus:
            nodes[node(gpu)].append(gpu)
        leaving[tuple(sorted(atom.ranks))] += atom.nbytes * len(nodes)
        for gpus in nodes.values():
            landing[tuple(sorted(gpus))] += atom.nbytes
    return max(_least_maximum(leaving), _least_maximum(landing))


def _least_maximum(demand: dict[tuple[int, ...], int]) -> float:
    """Split each demand over its candidates so that the fullest one is as empty as can be."""
    if not demand:
        return 0.0
    places = {who: place for place, who in enumerate(sorted({c for group in demand for c in group}))}
    pairs = [(row, places[c]) for row, group in enumerate(demand) for c in group]
    rows, columns = np.array(pairs).T
    shares, count = np.arange(len(pairs)), len(pairs)
    unit = float(max(demand.values()))  # keeps the numbers near 1
    # Unknowns: the share of each (demand, candidate), and the fullest load.
    met = coo_array((np.ones(count), (rows, shares)), shape=(len(demand), count + 1))
    load = coo_array(
        (
            np.concatenate([np.ones(count), -np.ones(len(places))]),
            (
                np.concatenate([columns, np.arange(len(places))]),
                np.concatenate([shares, np.full(len(places), count)]),
            ),
        ),
        shape=(len(places), count + 1),
    )
    found = linprog(
        np.concatenate([np.zeros(count), [1.0]]),
        A_ub=load.tocsr(),
        b_ub=np.zeros(len(places)),
        A_eq=met.tocsr(),
        b_eq=np.array([value / unit for value in demand.values()]),
        method="highs",
    )
    assert found.status == 0, found.message
    return float(found.fun) * unit
