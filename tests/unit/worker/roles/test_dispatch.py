"""Dispatch: rows come back complete and in order; nobody gets what it does not read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.common.context_spans import ContextSplit
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.ragged_batch import INPUT_IDS, ROUTED_EXPERTS, RaggedBatch
from grpo_worker.data.balance import balanced, within_budget
from grpo_worker.roles.dispatch import Columns, Dispatch, RankInfo, dispatch_mode, reads_of, register
from grpo_worker.roles.shared_batch import Partition, SharedBatch, SharedRows
from support.batch_stores import plain_store

lengths_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=23)
layouts = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3))
LOSS = ("advantages", "weights")


def ranks_of(tp: int, cp: int, dp: int, pp: int, packed: bool = False) -> list[RankInfo]:
    """Megatron's order: tensor innermost, then context, data, pipeline."""
    places = [(t, p, c, d) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]
    return [RankInfo(rank, *place, pp, dp, tp, cp, packed) for rank, place in enumerate(places)]


def batch_of(lengths: list[tuple[int, int]]) -> RaggedBatch:
    prompts = np.array([before for before, _ in lengths], np.int32)
    whole = prompts + np.array([after for _, after in lengths], np.int32)
    answers = int((whole - prompts).sum())
    return RaggedBatch(
        prompts,
        whole,
        int(whole.max()),
        np.arange(whole.sum(), dtype=np.int32),
        {"advantages": np.arange(answers, dtype=np.float32), "token": np.arange(answers, dtype=np.int32)},
        {"weights": np.ones(len(lengths), np.float32), "number": np.arange(len(lengths))},
    )


class Worker:
    """A rank that answers from the columns it got."""

    def __init__(self, place: RankInfo) -> None:
        self.rank_info = place

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS, "token", "number", *LOSS))
    def echo(self, batch: RaggedBatch, factor: int) -> Columns:
        self.batch = batch
        if not self.rank_info.last_stage:
            return Columns()
        return Columns({"token": batch.response["token"] * factor}, {"number": batch.row["number"]})

    @register(Dispatch.MEGATRON_COMPUTE, LOSS)
    def weigh(self, batch: RaggedBatch) -> float:
        self.batch = batch
        return 3.0


def call(workers: list[Any], method: str, rows: SharedRows, *args: Any) -> Any:
    """Call every worker as the worker group does, with arrays instead of references."""
    results = []
    for worker in workers:
        columns, arrays = rows.arguments(worker.rank_info, reads_of(getattr(type(worker), method)))
        results.append(getattr(worker, method)(columns, args, *arrays))
    flat = any(isinstance(result, Columns) for result in results)
    for worker, result in zip(workers, results, strict=True):
        info: RankInfo = worker.rank_info
        assert (result is not None) == (info.collected and (flat or info.cp_rank == 0))
    return rows.join(results)


@given(sizes=layouts, lengths=lengths_strategy, per_step=st.integers(1, 30))
def test_rows_come_back_in_order(
    sizes: tuple[int, int, int, int], lengths: list[tuple[int, int]], per_step: int
) -> None:
    ranks, batch = ranks_of(*sizes), batch_of(lengths)
    shared = SharedBatch(batch, per_step, ranks, plain_store())
    workers = [Worker(place) for place in ranks]
    found = call(workers, "echo", shared.all(), -2)
    assert np.array_equal(found.response["token"], -2 * batch.response["token"])
    assert np.array_equal(found.row["number"], batch.row["number"])
    assert len({worker.batch.rows for worker in workers}) == 1, "equally many rows on every rank"
    for number, rows in enumerate(shared.each_step()):
        part = call(workers, "echo", rows, 1)
        first = number * per_step
        assert part.row["number"].tolist() == list(range(first, min(first + per_step, len(lengths))))
        assert call(workers, "weigh", rows) == 3.0


@given(sizes=layouts, lengths=lengths_strategy, per_step=st.integers(1, 30), packed=st.booleans())
def test_context_ranks_get_the_tokens_that_they_read(
    sizes: tuple[int, int, int, int], lengths: list[tuple[int, int]], per_step: int, packed: bool
) -> None:
    ranks, batch = ranks_of(*sizes, packed=packed), batch_of(lengths)
    shared = SharedBatch(batch, per_step, ranks, plain_store())
    workers = [Worker(place) for place in ranks]
    call(workers, "echo", shared.all(), 1)
    for worker in (worker for worker in workers if worker.rank_info.pp_rank == 0):
        info, got = worker.rank_info, worker.batch
        assert got.input_ids is not None
        for number, row in enumerate(np.concatenate([p[info.dp_rank] for p in shared.partition.pieces])):
            ids = got.input_ids[got.starts[number] : got.starts[number + 1]]
            whole = batch.take_column(INPUT_IDS, [row])
            width = None if packed else batch.width
            split = ContextSplit(info.tp_size, info.cp_size, info.cp_rank, width)
            spans = split.spans([len(whole)])[0].tolist() if info.cp_size > 1 else [(0, len(whole))]
            read = {t for first, end in spans for t in range(first, end + 2) if t < len(whole)}
            expected = [whole[t] if t in read or info.cp_size == 1 else 0 for t in range(len(whole))]
            assert ids.tolist() == expected
            if not info.last_stage:
                continue
            # A rank's outputs predict the tokens after its own.
            predicted = {t + 1 for first, end in spans for t in range(first, end)}
            places = range(int(batch.prompt_lengths[row]), int(batch.lengths[row]))
            column = batch.take_column("advantages", [row]).tolist()
            expected = [v if t in predicted else 0 for t, v in zip(places, column, strict=True)]
            loss = got.response["advantages"]
            assert loss[got.response_starts[number] : got.response_starts[number + 1]].tolist() == expected


@given(dp=st.integers(1, 5), lengths=lengths_strategy, per_step=st.integers(1, 30))
def test_padding_rows_have_no_weight(dp: int, lengths: list[tuple[int, int]], per_step: int) -> None:
    ranks = ranks_of(1, 1, dp, 1)
    shared = SharedBatch(batch_of(lengths), per_step, ranks, plain_store())
    workers = [Worker(place) for place in ranks]
    call(workers, "echo", shared.all(), 1)
    counted = [worker.batch.row["number"][worker.batch.row["weights"] > 0] for worker in workers]
    assert sorted(np.concatenate(counted).tolist()) == list(range(len(lengths)))


def test_ranks_get_the_columns_that_they_read() -> None:
    ranks = ranks_of(1, 1, 1, 3)
    shared = SharedBatch(batch_of([(2, 3)] * 4), 4, ranks, plain_store())
    columns = [shared.all().arguments(info, (INPUT_IDS, ROUTED_EXPERTS, *LOSS))[0] for info in ranks]
    assert [names.ids for names in columns] == [True, False, True]
    assert [(names.response, names.row) for names in columns] == [
        ((), ()),
        ((), ()),
        (("advantages",), ("weights",)),
    ]


def test_each_part_of_a_column_is_put_once_and_mapped_without_a_copy() -> None:
    puts: list[np.ndarray] = []

    def put(array: np.ndarray) -> np.ndarray:
        puts.append(array)
        array.setflags(write=False)  # as in Ray's object store
        return array

    ranks, batch = ranks_of(2, 1, 2, 2), batch_of([(2, 3)] * 8)
    shared = SharedBatch(batch, 4, ranks, replace(plain_store(), put=put))
    workers = [Worker(place) for place in ranks]
    for rows in (shared.all(), shared.all(), *shared.each_step()):
        call(workers, "echo", rows, 1)
    assert len(puts) == 2 * 2 * 6, "two steps, two data-parallel ranks, six columns"
    assert shared.put_bytes == sum(array.nbytes for array in puts) == batch.nbytes
    sent = [array.ctypes.data for array in puts]
    assert workers[0].batch.input_ids is not None and workers[0].batch.input_ids.ctypes.data in sent
    shared.batch = shared.batch.with_columns(advantages2=batch.response["advantages"])
    call(workers, "echo", shared.all(), 1)
    assert len(puts) == 24, "nobody reads the new column"


def test_long_rows_are_spread_over_data_parallel_ranks() -> None:
    lengths = np.array([100] * 4 + [10] * 12)
    (pieces,) = Partition(lengths, 16, 4).pieces
    assert [int(lengths[piece].sum()) for piece in pieces] == [130] * 4


def test_a_rank_labels_its_lines_with_the_step_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LABELS, "step", None)
    ranks = ranks_of(1, 1, 1, 1)
    shared = SharedBatch(batch_of([(2, 3)] * 4), 4, ranks, plain_store())
    for step in (16, 17):
        shared.step = step
        call([Worker(ranks[0])], "weigh", shared.all())
        assert LABELS.step == step


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        Partition(np.zeros(0, np.int32), 4, 1)


def test_registered_methods_know_their_protocol() -> None:
    class Other:
        @register(Dispatch.RANK_ZERO)
        def one(self) -> None: ...

        def other(self) -> None: ...

    assert dispatch_mode(Other.one) is Dispatch.RANK_ZERO and dispatch_mode(Other.other) is None


@given(lengths=st.lists(st.integers(1, 4096), max_size=60), parts=st.integers(1, 9), equal=st.booleans())
def test_balanced_groups_hold_every_row_once(lengths: list[int], parts: int, equal: bool) -> None:
    groups = balanced(lengths, parts, equal)
    assert len(groups) == parts and sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert groups == balanced(lengths, parts, equal)
    if equal:
        sizes = [len(group) for group in groups]
        assert max(sizes) - min(sizes) <= 1
    sums = [sum(lengths[i] for i in group) for group in groups]
    if lengths and not equal:
        assert max(sums) - min(sums) <= max(lengths)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), budget=st.integers(100, 400))
def test_no_group_exceeds_the_budget(lengths: list[int], budget: int) -> None:
    groups = within_budget(lengths, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= budget for group in groups)
    assert len(groups) <= 2 * -(-sum(lengths) // budget)


def test_a_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sequence has 101 tokens, trainer\.maxTokensPerGpu is 100"):
        within_budget([5, 101], 100)
    with pytest.raises(ValueError, match=r"trainer\.logProbMaxTokensPerGpu is 50 on each of 2 "):
        within_budget([5, 101], 50, 2, "logProbMaxTokensPerGpu")
