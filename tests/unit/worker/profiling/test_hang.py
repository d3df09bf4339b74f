"""Which rank a hanging gang waits for."""

from grpo_worker.profiling.hang import Position, report, stuck_ranks

TENSOR, DATA = "2 [0, 1]", "3 [1, 2]"


def at(rank: int, **begun: int) -> Position:
    names = {"tensor": TENSOR, "data": DATA, "other": "4 [2, 3]"}
    return Position(rank, {names[key]: count for key, count in begun.items()}, (f"file.py:{rank} work",))


def test_a_rank_that_is_behind_is_stuck_and_those_that_wait_for_it_are_not() -> None:
    # 0 never began tensor's 6th; 1 waits there and so never began data's 9th, where 2 waits.
    positions = [at(0, tensor=5), at(1, tensor=6, data=8), at(2, data=9, other=1), at(3, other=1)]
    assert stuck_ranks(positions) == [0]
    said = report(positions)
    assert "rank 0 is stuck in file.py:0 work" in said
    assert f"group {TENSOR}: 5 collectives begun, others 6" in said


def test_a_silent_rank_is_stuck() -> None:
    positions = [at(0, tensor=6), None]
    assert stuck_ranks(positions) == [1]
    assert report(positions) == "rank 1 answers nothing"


def test_ranks_that_are_as_far_as_each_other_are_not_stuck() -> None:
    positions = [at(0, tensor=6), at(1, tensor=6)]
    assert stuck_ranks(positions) == []
    assert report(positions) == "all ranks began the same collectives"
