"""Bytes of a batch between controller and pods: each part is sent once, to those who keep it."""

from collections import Counter

import numpy as np
import pytest

from grpo_rehearsal.standins.ranks import infos_of
from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch
from grpo_worker.roles.dispatch import Columns, collect
from grpo_worker.roles.shared_batch import SharedBatch
from support.batch_stores import CONTROLLER, TRAINERS, CountedStore

GPUS = 8  # of a pod
ROWS, LENGTH = 16, 16384
IDS = ROWS * LENGTH * 4  # bytes


def _fetched(tensor: int, context: int, data: int, pipeline: int, calls: int = 1) -> Counter[str]:
    """Return the bytes of ids that pods fetch for calls, by link."""
    lengths = np.full(ROWS, LENGTH, np.int32)
    ids = np.arange(ROWS * LENGTH, dtype=np.int32)
    ranks = infos_of(tensor, context, data, pipeline)
    counted = CountedStore(len(ranks), GPUS)
    shared = SharedBatch(RaggedBatch(lengths // 4, lengths, LENGTH, ids), ROWS, ranks, counted.store)
    for _ in range(calls):
        read = {info.rank: counted.arrays(shared.all(), info, (INPUT_IDS,)) for info in ranks}
    parts = {(info.dp_rank, info.cp_rank): read[info.rank][1] for info in ranks if info.pp_rank == 0}
    for info in ranks:
        assert [array.ndim for array in read[info.rank]] == ([2, 1] if info.reads((INPUT_IDS,)) else [2])
        assert (
            info.pp_rank not in (0, pipeline - 1) or read[info.rank][1] is parts[info.dp_rank, info.cp_rank]
        )
    small = 2 * 4 * ROWS * -(-len(ranks) // GPUS)  # the lengths leave for each pod
    labels = 2 * 2 * 4 * ROWS * context  # the tokens after each of two chunks
    assert counted.nbytes[CONTROLLER] - IDS <= small + labels
    return counted.nbytes


@pytest.mark.parametrize(("tensor", "context"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_parts_of_rows_cost_nothing_inside_a_pod(tensor: int, context: int) -> None:
    """Megatron-Core numbers context ranks right after tensor ranks, so the pod holds all of them."""
    assert _fetched(tensor, context, data=2, pipeline=1)[TRAINERS] == 0


@pytest.mark.parametrize(("tensor", "context"), [(8, 2), (4, 4), (8, 4)])
def test_each_pod_of_a_row_fetches_the_tokens_of_its_context_ranks(tensor: int, context: int) -> None:
    assert _fetched(tensor, context, data=2, pipeline=1)[TRAINERS] == 0


@pytest.mark.parametrize("pipeline", [2, 4, 16])
def test_the_last_pipeline_stage_gets_the_ids_from_the_first_one(pipeline: int) -> None:
    """As in the 512-GPU job: two replicas in each pod, two pods for each stage."""
    assert _fetched(4, 1, data=4, pipeline=pipeline)[TRAINERS] == IDS


def test_later_calls_of_a_step_fetch_nothing() -> None:
    assert _fetched(4, 1, data=4, pipeline=4, calls=3) == _fetched(4, 1, data=4, pipeline=4)


def test_stages_in_one_pod_share_the_ids() -> None:
    assert _fetched(2, 1, data=1, pipeline=4)[TRAINERS] == 0


LOSS = ("old_log_probs", "ref_log_prob", "rollout_is_weights", "advantages", "values", "returns")


def _of_each_node(
    context: int, prompts: np.ndarray, lengths: np.ndarray, packed: bool = False
) -> tuple[list[int], list[int]]:
    """Return the bytes of columns that each node fetches and returns; a node has the ranks of one chunk."""
    ids = np.arange(lengths.sum(), dtype=np.int32)
    loss = {name: np.ones(int((lengths - prompts).sum()), np.float32) for name in LOSS}
    ranks = infos_of(GPUS, context, 1, 1, packed)
    counted = CountedStore(len(ranks), GPUS)
    shared = SharedBatch(RaggedBatch(prompts, lengths, LENGTH, ids, loss), ROWS, ranks, counted.store)
    fetched, returned = [0] * context, [0] * context
    for info in ranks:
        columns, _ = shared.all().arguments(info, (INPUT_IDS, *LOSS))
        before = sum(counted.nbytes.values())
        arrays = counted.arrays(shared.all(), info, (INPUT_IDS, *LOSS))
        fetched[info.cp_rank] += sum(counted.nbytes.values()) - before
        rows = columns.batch(arrays)
        found = collect(info, rows, Columns({"log_probs": rows.response["advantages"]}))
        if found is not None:
            returned[info.cp_rank] += found.response["log_probs"].nbytes
    return fetched, returned


@pytest.mark.parametrize("context", [2, 4])
def test_a_context_parallel_node_fetches_and_returns_its_part_of_each_column(context: int) -> None:
    lengths, prompts = np.full(ROWS, LENGTH, np.int32), np.ones(ROWS, np.int32)
    (whole,), (answer,) = _of_each_node(1, prompts, lengths)
    fetched, returned = _of_each_node(context, prompts, lengths)
    assert sum(returned) == answer, "each log-probability once"
    # The tokens after each of two chunks, the lengths, and the first token, which no output predicts.
    beside = 4 * ROWS * (2 * 2 + 2 + len(LOSS))
    assert max(abs(theirs - whole / context) for theirs in fetched) <= beside < whole / 1000
    assert max(abs(theirs - answer / context) for theirs in returned) <= beside


@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_nodes_fetch_and_return_each_entry_once(context: int) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(LENGTH // 2, LENGTH + 1, ROWS).astype(np.int32)
    prompts = (lengths // generator.integers(2, 9, ROWS)).astype(np.int32)
    (whole,), (answer,) = _of_each_node(1, prompts, lengths)
    fetched, returned = _of_each_node(context, prompts, lengths)
    labels, counts = 4 * ROWS * 2 * 2 * context, 4 * ROWS * 2 * context
    assert whole <= sum(fetched) <= whole + labels + counts
    assert sum(returned) == answer


@pytest.mark.parametrize("context", [2, 4])
def test_packed_rows_of_any_length_give_each_node_the_same(context: int) -> None:
    """Padded rows of these lengths would leave the nodes of the last chunks nothing."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(LENGTH // 16, LENGTH + 1, ROWS).astype(np.int32)
    prompts = np.ones(ROWS, np.int32)
    (whole,), (answer,) = _of_each_node(1, prompts, lengths)
    fetched, returned = _of_each_node(context, prompts, lengths, packed=True)
    assert sum(returned) == answer
    apart = 4 * ROWS * (2 * GPUS * context + 2 * 2 + 2) * (1 + len(LOSS))  # chunks are cut at multiples
    assert max(abs(theirs - whole / context) for theirs in fetched) <= apart < whole / 100
