"""Dispatch protocols: rows come back complete and in order, for any layout and batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo_worker.data.balance import balanced, within_budget
from grpo_worker.roles.dispatch import BatchPartition, Dispatch, RankInfo, dispatch_mode, register

SPLITTING = [mode for mode in Dispatch if mode.splits]
lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=23)


def ranks_of(tp: int, cp: int, dp: int, pp: int) -> list[RankInfo]:
    """Megatron's order: tensor innermost, then context, data, pipeline."""
    places = [(t, p, c, d) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]
    return [RankInfo(rank, *place, pp, dp) for rank, place in enumerate(places)]


def batch_of(lengths: list[int]) -> TensorDict:
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    rows = torch.arange(len(lengths))
    return TensorDict(
        {"row": rows, "attention_mask": mask, "weights": torch.ones(len(lengths), width)},
        batch_size=[len(lengths)],
    )


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 3)),
    lengths=lengths_strategy,
    mode=st.sampled_from(SPLITTING),
)
def test_partitioned_rows_come_back_in_order(
    sizes: tuple[int, int, int, int], lengths: list[int], mode: Dispatch
) -> None:
    ranks = ranks_of(*sizes)
    batch = batch_of(lengths)
    deal = BatchPartition(batch, ranks, mode)
    assert len({part.rows for part in deal.parts}) == 1

    class Worker:
        def __init__(self, place: RankInfo) -> None:
            self.rank_info = place

        @register(mode)
        def echo(self, part: TensorDict, negative: bool) -> TensorDict:
            return TensorDict({"x": -part["row"] if negative else part["row"]}, batch_size=part.batch_size)

        @register(mode)
        def count(self, part: TensorDict) -> int:
            return len(part)

    workers = [(Worker(place), deal.parts[number]) for place, number in zip(ranks, deal.part_of, strict=True)]
    answers = [worker.echo(part, True) for worker, part in workers]
    assert all(
        (answer is not None) == place.collects(mode) for answer, place in zip(answers, ranks, strict=True)
    )
    assert torch.equal(-deal.join(answers)["x"], batch["row"])
    assert deal.join([worker.count(part) for worker, part in workers]) == deal.parts[0].rows


@given(dp=st.integers(1, 5), lengths=lengths_strategy)
def test_padding_rows_have_no_weight(dp: int, lengths: list[int]) -> None:
    deal = BatchPartition(batch_of(lengths), ranks_of(1, 1, dp, 1), Dispatch.MEGATRON_COMPUTE)
    weight = sum(float(part.columns["weights"][:, 0].sum()) for part in deal.parts)
    assert weight == len(lengths)
    columns = [part.columns for part in deal.parts]
    counted = sorted(int(row) for part in columns for row in part["row"][part["weights"][:, 0] > 0])
    assert counted == list(range(len(lengths)))


def test_long_rows_are_spread_over_data_parallel_ranks() -> None:
    lengths = [100] * 4 + [10] * 12
    deal = BatchPartition(batch_of(lengths), ranks_of(2, 1, 4, 1), Dispatch.MEGATRON_COMPUTE)
    assert [int(part.columns["attention_mask"].sum()) for part in deal.parts] == [130] * 4


def test_ranks_of_a_replica_get_the_same_rows() -> None:
    ranks = ranks_of(2, 1, 2, 2)
    same = BatchPartition(batch_of([3] * 8), ranks, Dispatch.MEGATRON_COMPUTE)
    assert same.part_of[:4] == same.part_of[4:] == [0, 0, 1, 1]
    shared = BatchPartition(batch_of([3] * 8), ranks, Dispatch.MEGATRON_PP_AS_DP)
    assert {part.rows for part in shared.parts} == {2} and len(set(shared.part_of)) == 4


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        BatchPartition(
            TensorDict({"x": torch.zeros(0)}, batch_size=[0]), ranks_of(1, 1, 1, 1), Dispatch.DP_COMPUTE
        )


def test_registered_methods_know_their_protocol() -> None:
    class Worker:
        @register(Dispatch.RANK_ZERO)
        def one(self) -> None: ...

        def other(self) -> None: ...

    assert dispatch_mode(Worker.one) is Dispatch.RANK_ZERO and dispatch_mode(Worker.other) is None


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
