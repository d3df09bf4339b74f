"""An engine that computes no numbers: its samples are generated again; it ends the job only if it stays."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import EngineState, Phase
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.rollout.sampling import Sample
from support.loop_world import World
from support.parking import without_attempts


def _with_nan(world: World, attempts: int, broken_version: int = 0) -> list[tuple[str, str]]:
    """Let the engine compute a NaN for a version in some attempts; return who was suspected, and why."""
    sample, suspect = world.engines._sample, world.engines.table.suspect
    suspected: list[tuple[str, str]] = []

    def broken(prompt: Prompt, number: int, version: int) -> Sample:
        made = sample(prompt, number, version)
        if len(world.groups) > attempts or number != 1 or version != broken_version:
            return made
        return replace(made, log_probs=[math.nan, *made.log_probs[1:]])

    world.engines._sample = broken  # type: ignore[method-assign]
    world.engines.table.update(EngineEntry("engine", "10.1.0.1", EngineState.SERVING, 0))

    def noted(name: str, reason: str) -> None:
        suspect(name, reason)
        entry = world.engines.table.entry(name)
        assert entry is not None and entry.state == EngineState.RESTARTING and entry.version is None
        suspected.append((name, reason))

    world.engines.table.suspect = noted  # type: ignore[method-assign]
    return suspected


@pytest.mark.fault(
    row="24",
    point="an engine answers NaN in two attempts",
    witness="the message names engine, sample and token",
    bound="before the update",
    compared="ledger of an undisturbed run",
    partial="stand-in engine; no wrong gradient, no localization",
)
@pytest.mark.parametrize("version", [0, 3], ids=["first", "later"])
def test_an_engine_that_computes_no_number_twice_costs_two_attempts(tmp_path: Path, version: int) -> None:
    calm = without_attempts(World(tmp_path / "calm").run())
    world = World(tmp_path / "broken")
    suspected = _with_nan(world, attempts=2, broken_version=version)
    assert without_attempts(world.run()) == calm
    status = world.board.get()
    assert (status.phase, status.attempt, status.restarts.job) == (Phase.SUCCEEDED, 3, 2)
    assert [name for name, _ in suspected] == ["engine"] * 2
    first = version * world.spec.data.train_batch_size
    said = (
        f"engine computed a log-probability that is no number, for sample {first}.1, token 0 of the response"
    )
    assert status.last_failure.startswith(said) and suspected[0][1].startswith(said)


@pytest.mark.parametrize("changes", [{}, {"restartPolicy": {"maxSameFailures": 2}}], ids=["default", "two"])
def test_numbers_that_never_come_end_the_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = World(tmp_path, **changes)
    _with_nan(world, attempts=99)
    assert world.run() == [], "nothing was trained on"
    status = world.board.get()
    times = world.spec.restart_policy.max_same_failures
    assert (status.phase, status.attempt) == (Phase.FAILED, times)
    assert "for sample 0.1" in status.message and f"({times} times in a row)" in status.message
