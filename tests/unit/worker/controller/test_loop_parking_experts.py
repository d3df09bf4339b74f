"""Engines that end before their routed experts are loaded: the trainers are parked, the groups come again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.data.routed_experts import RoutedExperts
from support.loop_world import Ranks, World
from support.parking import OUTAGE, die_while_waiting, without_attempts


def _engines_end_before_the_experts_are_loaded(world: World, first: int, rounds: int = 1) -> None:
    """All engines' pods end after a batch has arrived, ``rounds`` times in a row, for two hours each.

    ``first``: the batch, counted by the calls that load experts.
    """
    until, calls = 0.0, 0
    load = Ranks._load_routed_experts

    def ends(ranks: Ranks, parts: list[list[RoutedExperts]], width: int, fetching: Any) -> list[list[str]]:
        nonlocal until, calls
        calls += 1
        if first <= calls < first + rounds:
            until = world.clock.now() + OUTAGE
        return load(ranks, parts, width, fetching)

    world.routing_replay = True
    world.lost = lambda _reference: first <= calls < first + rounds
    world.away = lambda: "0 of minAvailable=1 engines serve" if world.clock.now() < until else ""
    make = world._group

    def group(_pool: Any) -> Ranks:
        ranks = make(_pool)
        ranks._load_routed_experts = partial(ends, ranks)  # type: ignore[method-assign]
        return ranks

    world._group = group  # type: ignore[method-assign]


@pytest.mark.parametrize("rounds", [1, 5], ids=["once", "repeatedly"])
def test_engines_that_end_before_their_experts_are_loaded_park_the_trainers(
    tmp_path: Path, rounds: int
) -> None:
    undisturbed = World(tmp_path / "calm").run()
    world = World(tmp_path / "away")
    _engines_end_before_the_experts_are_loaded(world, first=3, rounds=rounds)
    assert world.run() == undisturbed, "the lost groups again, with the same seeds"
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts) == (Phase.SUCCEEDED, 1, 1)
    assert status.restarts.infrastructure == status.restarts.job == 0
    assert status.times_parked == rounds and status.waiting == ""
    assert world.clock.now() >= 1000 + rounds * OUTAGE
    waiting = [seen.waiting for seen in world.seen if seen.waiting]
    assert any("engines serve" in text or "no engine serves" in text for text in waiting)
    assert any("engine.routedExpertsGibibytes is too small" in text for text in waiting) == (rounds > 2)
    assert world.calls.count("save_checkpoint") == 3, "steps 4 and 6, and step 2 while parked"
    assert (tmp_path / "away" / "checkpoints" / "step-00000002.attempt-1" / "COMMITTED").is_file()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("first", [3, 5])
def test_trainers_that_die_while_engines_generate_lost_groups_lose_no_step(
    tmp_path: Path, first: int, lag: int
) -> None:
    """Step 2 is saved while the trainers are parked, step 4 before; with a lag the batch is saved too."""
    changes: dict[str, Any] = {"staleness": {"maxVersionLag": lag}}
    undisturbed = World(tmp_path / "calm", **changes).run()
    world = World(tmp_path / "lost", **changes)
    _engines_end_before_the_experts_are_loaded(world, first=first)
    die_while_waiting(world)
    assert without_attempts(world.run()) == without_attempts(undisturbed)
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts) == (Phase.SUCCEEDED, 2, 2)
    assert status.restored is not None and status.restored.step == first - 1
    assert status.restarts.infrastructure == 1 and "rank 1 on trainer-0" in status.last_failure
