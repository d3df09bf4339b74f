"""The hang detector: which rank a gang waits for."""

from grpo_worker.profiling.hang import Position, report, stuck_ranks

TENSOR, DATA = "2 [0, 1]", "3 [1, 2]"


def at(rank: int, **begun: int) -> Position:
    names = {"tensor": TENSOR, "data": DATA, "other": "4 [2, 3]"}
    return Position(rank, {names[key]: count for key, count in begun.items()}, (f"file.py:{rank} work",))


def test_only_the_rank_that_is_behind_is_stuck() -> None:
    # 0 never began tensor's 6th; 1 waits there and so never began data's 9th, where 2 waits.
    positions = [at(0, tensor=5), at(1, tensor=6, data=8), at(2, data=9, other=1), at(3, other=1)]
    assert stuck_ranks(positions) == [0]
    message = report(positions)
    assert "rank 0 is stuck in file.py:0 work" in message
    assert f"group {TENSOR}: 5 collectives begun, others 6" in message


def test_an_unresponsive_rank_is_stuck() -> None:
    positions = [at(0, tensor=6), None]
    assert stuck_ranks(positions) == [1]
    assert report(positions) == "rank 1 does not respond"


def test_ranks_at_the_same_collective_are_not_stuck() -> None:
    positions = [at(0, tensor=6), at(1, tensor=6)]
    assert stuck_ranks(positions) == []
    assert report(positions) == (
        "all ranks began the same collectives: rank 0 is stuck in file.py:0 work; "
        "rank 1 is stuck in file.py:1 work"
    )
