"""Lower bound of the busiest interface's load over all possible routes: a linear program. Pure.

It needs scipy, which is not in the images; only benchmarks and tests use it.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from grpo_worker.weightsync.planner.regions import Atom
from grpo_worker.weightsync.planner.routes import Node


def lower_bound(atoms: Sequence[Atom], node: Node, senders: Node = int, receivers: Node = int) -> float:
    """Return the bound in bytes.

    ``senders``, ``receivers``: interface of a trainer rank and of a GPU of an engine; by default its own.

    It assumes that atoms can be split in any way between their possible senders, and independently between
    the GPUs of each node.
    """
    leaving: dict[tuple[int, ...], int] = defaultdict(int)
    landing: dict[tuple[int, ...], int] = defaultdict(int)
    for atom in atoms:
        nodes: dict[int, list[int]] = defaultdict(list)
        for gpu in atom.gpus:
            nodes[node(gpu)].append(gpu)
        leaving[tuple(sorted(set(map(senders, atom.ranks))))] += atom.nbytes * len(nodes)
        for gpus in nodes.values():
            landing[tuple(sorted(set(map(receivers, gpus))))] += atom.nbytes
    return max(_least_maximum(leaving), _least_maximum(landing))


def _least_maximum(demand: dict[tuple[int, ...], int]) -> float:
    """Split each demand over its candidates; return the smallest possible load of the fullest one."""
    if not demand:
        return 0.0
    columns_of = {who: column for column, who in enumerate(sorted({c for group in demand for c in group}))}
    pairs = [(row, columns_of[c]) for row, group in enumerate(demand) for c in group]
    rows, columns = np.array(pairs).T
    shares, count = np.arange(len(pairs)), len(pairs)
    unit = float(max(demand.values()))  # keeps the coefficients near 1
    # Unknowns: the share of each (demand, candidate), and the largest load.
    met = coo_array((np.ones(count), (rows, shares)), shape=(len(demand), count + 1))
    load = coo_array(
        (
            np.concatenate([np.ones(count), -np.ones(len(columns_of))]),
            (
                np.concatenate([columns, np.arange(len(columns_of))]),
                np.concatenate([shares, np.full(len(columns_of), count)]),
            ),
        ),
        shape=(len(columns_of), count + 1),
    )
    result = linprog(
        np.concatenate([np.zeros(count), [1.0]]),
        A_ub=load.tocsr(),
        b_ub=np.zeros(len(columns_of)),
        A_eq=met.tocsr(),
        b_eq=np.array([value / unit for value in demand.values()]),
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.fun) * unit
