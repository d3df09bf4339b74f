"""Checkpoints in the store: saves beside the training, restores after a loss of nodes, slow stores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_rehearsal.durations import Assumptions
from grpo_rehearsal.job import RehearsedJob, read_job
from grpo_rehearsal.report.summary import summary
from grpo_rehearsal.run import Outcome, rehearse
from grpo_rehearsal.scenario import Scenario
from grpo_rehearsal.standins.state_bytes import STATE

SAMPLES = 64
HANG = 60
FAST = Assumptions(store_rate=20e9)  # a checkpoint is written within a step
Rehearse = Callable[[Scenario], Outcome]


@pytest.fixture
def saving(two_nodes: RehearsedJob, small_manifest: Path, tmp_path: Path) -> Rehearse:
    job = read_job(small_manifest, checkpoint_every=1)
    return lambda scenario: rehearse(job, scenario, tmp_path / scenario.name)


def deadline(figures: dict[str, Any], method: str) -> dict[str, Any]:
    text = f"progress in {method} (restartPolicy.hangSeconds)"
    entries: dict[str, dict[str, Any]] = {entry["what"]: entry for entry in figures["deadlines"]}
    return entries[text]


def lost_in_the_third_step(saving: Rehearse) -> Outcome:
    history = saving(Scenario(name="calm", steps=3, assumed=FAST)).board.history
    began = next(when for when, name, value in history if name == "phase" and value is Phase.TRAINING)
    _, second, third = (when for when, name, _ in history if name == "step")
    late = second + 0.8 * (third - second) - began  # the checkpoint of the second step is complete
    deaths = (0, late), (1, late)
    return saving(Scenario(name="lost", steps=4, assumed=FAST, dead_nodes=deaths))


def test_a_step_waits_for_the_copy_and_the_store_takes_the_bytes_meanwhile(saving: Rehearse) -> None:
    outcome = saving(Scenario(name="saves", steps=4, assumed=FAST))
    figures, state = summary(outcome), outcome.cluster.durations.state
    saves, steps = figures["checkpoints"]["saves"], figures["steps"]
    assert [save["step"] for save in saves] == [1, 2, 3, 4] and figures["checkpoints"]["loads"] == []
    for save in saves:
        assert save["written"] - save["waited"] == pytest.approx(save["node_bytes"] / FAST.store_rate)
        assert save["written"] <= save["complete"] + 1e-6
    state_bytes = state.written(STATE).total
    assert saves[0]["bytes"] == state_bytes + outcome.cluster.durations.version_bytes, "a copy for engines"
    staged = sum(end - begin for method, begin, end in figures["calls"] if method == "publish_weights")
    assert saves[0]["waited"] <= steps[0]["save_checkpoint"] <= saves[0]["waited"] + staged
    assert figures["links"]["trainer>store"] == sum(save["bytes"] for save in saves)
    assert figures["links"]["store>trainer"] == state.read((2,)).total


def test_a_gang_that_lost_its_nodes_goes_on_from_the_store(saving: Rehearse) -> None:
    outcome = lost_in_the_third_step(saving)
    figures = summary(outcome)
    assert figures["phase"] == "Succeeded" and outcome.board.get().restarts.infrastructure == 1
    assert [what for _, what in figures["events"]] == ["training pod 0 is lost", "training pod 1 is lost"]
    restored = [value for _, name, value in outcome.board.history if name == "restored"]
    assert [(each.step, each.source) for each in restored if each.step] == [(2, "store")]
    assert figures["ledger"] == {"samples": 4 * SAMPLES, "consumed_twice": 0, "missing": 0}
    (load,) = figures["checkpoints"]["loads"]
    assert load["seconds"] == pytest.approx(load["node_bytes"] / FAST.store_rate)
    again = FAST.process_start + FAST.rendezvous + load["seconds"]
    assert again < figures["lost_node_recovery_seconds"] < again + 60


def test_the_deadlines_have_the_reads_and_writes_of_single_tensors(saving: Rehearse) -> None:
    figures = summary(lost_in_the_third_step(saving))
    for method in ("save_checkpoint", "poll_checkpoint", "load_checkpoint"):
        entry = deadline(figures, method)
        longest = max(end - begin for name, begin, end in figures["calls"] if name == method)
        assert 0 < entry["seconds"] < longest / 5 and not entry["upper_bound"]
    assert deadline(figures, "start")["upper_bound"], "the ranks' rendezvous is assumed as a whole"


@pytest.mark.parametrize(("rate", "phase"), [(0.3e9, "Succeeded"), (0.05e9, "Failed")])
def test_a_slow_store_counts_as_hanging_when_a_tensor_takes_too_long(
    rate: float, phase: str, small_manifest: Path, tmp_path: Path
) -> None:
    """Each rank reads its half of the embedding, 0.6 GB, at an eighth of the node's speed."""
    text = small_manifest.read_text() + f"  restartPolicy: {{hangSeconds: {HANG}}}\n"
    small_manifest.write_text(text)
    scenario = Scenario(name="slow", assumed=Assumptions(store_rate=rate))
    figures = summary(rehearse(read_job(small_manifest), scenario, tmp_path / "slow"))
    assert figures["phase"] == phase
    if phase == "Failed":
        assert "start: no progress" in figures["message"]
        return
    longest = max(end - begin for name, begin, end in figures["calls"] if name == "poll_checkpoint")
    assert deadline(figures, "poll_checkpoint")["seconds"] < HANG < longest


def test_a_gang_that_lost_rays_head_waits_for_it_and_goes_on_from_the_store(saving: Rehearse) -> None:
    history = saving(Scenario(name="calm", steps=3, assumed=FAST)).board.history
    began = next(when for when, name, value in history if name == "phase" and value is Phase.TRAINING)
    third = [when for when, name, _ in history if name == "step"][2]
    outcome = saving(Scenario(name="head", steps=4, assumed=FAST, lost_head=third - 1 - began))
    figures = summary(outcome)
    assert figures["phase"] == "Succeeded" and outcome.board.get().restarts.infrastructure == 1
    assert [what for _, what in figures["events"]] == ["Ray's head is lost"]
    restored = [value for _, name, value in outcome.board.history if name == "restored"]
    assert [(each.step, each.source) for each in restored if each.step] == [(2, "store")]
    assert figures["ledger"] == {"samples": 4 * SAMPLES, "consumed_twice": 0, "missing": 0}
    again = FAST.head_restart + FAST.process_start + FAST.rendezvous
    assert again < figures["lost_head_recovery_seconds"] < again + 90
