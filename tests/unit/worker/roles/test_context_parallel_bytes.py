"""Bytes that context parallelism adds to a batch's way: none while a row's ranks share a node."""

import numpy as np
import pytest

from grpo_rehearsal.standins.ranks import infos_of
from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch
from grpo_worker.roles.shared_batch import SharedBatch

GPUS = 8  # of a node


def _fetched(tensor: int, context: int, data: int, pipeline: int) -> int:
    """Return the bytes that all nodes fetch for one call; each fetches an object once."""
    lengths = np.full(16, 100, np.int32)
    ids = np.arange(1600, dtype=np.int32)
    ranks = infos_of(tensor, context, data, pipeline)
    shared = SharedBatch(RaggedBatch(lengths // 4, lengths, 100, ids), 16, ranks, lambda array: array)
    fetched: dict[tuple[int, int], int] = {}
    for info in ranks:
        for array in shared.all().arguments(info, (INPUT_IDS,))[1]:
            fetched[info.rank // GPUS, id(array)] = array.nbytes
    return sum(fetched.values())


@pytest.mark.parametrize(("tensor", "context"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_whole_rows_cost_nothing_inside_a_node(tensor: int, context: int) -> None:
    """Megatron-Core numbers context ranks right after tensor ranks, so the node holds all of them."""
    assert _fetched(tensor, context, data=2, pipeline=2) == _fetched(8, 1, data=2, pipeline=2)


@pytest.mark.parametrize(("tensor", "context", "nodes"), [(8, 2, 2), (4, 4, 2), (8, 4, 4)])
def test_each_further_node_of_a_row_fetches_it_too(tensor: int, context: int, nodes: int) -> None:
    assert _fetched(tensor, context, data=2, pipeline=2) == nodes * _fetched(8, 1, data=2, pipeline=2)
