"""Predicted seconds of planned transfers, by hand for small plans."""

import pytest

from grpo_worker.weightsync.planner.makespan import Interfaces, makespan
from grpo_worker.weightsync.planner.schedule import Message, Wave

OWN = Interfaces(trainer=lambda rank: rank, engine=lambda engine, rank: 100 * (engine + 1) + rank)
ONE_HOST = Interfaces(trainer=lambda _: 0, engine=OWN.engine)


def message(source: int, landing: int, nbytes: int) -> Message:
    return Message(source, landing, (), True, (), nbytes)


def test_waves_of_one_pair_follow_each_other() -> None:
    waves: list[Wave] = [(message(0, 0, 30),), (message(0, 0, 50),)]
    assert makespan([waves], OWN, 10.0) == pytest.approx(8.0)


def test_the_busiest_interface_decides() -> None:
    waves: list[Wave] = [(message(0, 0, 40), message(1, 0, 40), message(1, 1, 10))]
    assert makespan([waves], OWN, 10.0) == pytest.approx(8.0)
    assert makespan([waves], ONE_HOST, 10.0) == pytest.approx(9.0)


def test_engines_share_the_trainers_interfaces() -> None:
    waves: list[Wave] = [(message(0, 0, 40),)]
    assert makespan([waves, waves], OWN, 10.0) == pytest.approx(8.0)


def test_a_member_has_memory_for_two_waves() -> None:
    """Rank 1 cannot start its third wave before the first has ended, for which engine rank 0 needs 101 s."""
    waves: list[Wave] = [(message(0, 0, 100), message(1, 0, 1)), (message(1, 0, 1),), (message(1, 1, 10),)]
    assert makespan([waves], OWN, 1.0) == pytest.approx(111.0)


def test_nothing_takes_no_time() -> None:
    assert makespan([], OWN, 1.0) == makespan([[]], OWN, 1.0) == 0.0
