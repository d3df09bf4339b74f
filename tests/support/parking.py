"""Outages of engines, and deaths of trainers while they wait, in a ``World`` of virtual time."""

import itertools
from collections.abc import Callable
from typing import Any

from support.loop_world import World

OUTAGE = 7200.0  # seconds


def without_attempts(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "attempt"} for entry in ledger]


def away_during_generation(world: World, version: int) -> None:
    """All engines go away when ``version`` is about to generate, for two hours."""
    until = None

    def away() -> str:
        return "0 of minAvailable=1 engines serve: engine-0 RESTARTING" if until_now() else ""

    def until_now() -> bool:
        return until is not None and world.clock.now() < until

    def before(seen: int) -> None:
        nonlocal until
        if seen == version and until is None:
            until = world.clock.now() + OUTAGE

    world.away, world.before_generation = away, before


def die_while_waiting(world: World, counts: Callable[[], bool] = lambda: True) -> None:
    """A rank dies at the loop's 51st wait of those for which ``counts`` returns true."""
    sleep, polls = world.clock.sleep, itertools.count()

    def sleep_and_die(seconds: float) -> None:
        sleep(seconds)
        if counts() and next(polls) == 50:
            world.groups[0].died.set_result(None)

    world.clock.sleep = sleep_and_die  # type: ignore[method-assign]
