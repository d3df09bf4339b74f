"""Images that do not fit are refused or warned of, with both versions, the place and the remedy."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from grpo_operator.api.v1alpha1.status import EngineState, Phase
from grpo_worker.common.versions import Versions, installed
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.image_versions import check_engines, check_pool, versions_of
from grpo_worker.controller.training.parity import ParityError
from grpo_worker.roles.host import RankHost
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.rollout.routing import EngineEntry, EngineTable, entry_of
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from support.loop_world import Ranks, World

TRAINER = Versions("2.14.0a0+4fdf77b940.nv26.08", "2.30.7", "2.60.0", "0.16.1")
ENGINE = Versions("2.14.1", "2.30.7", "2.60.0", "0.16.1", "0.5.23")


def test_images_of_one_release_fit_on_the_bases_of_the_dockerfiles() -> None:
    assert check_engines(TRAINER, {"engine-0": ENGINE, "engine-1": ENGINE}, nccl=True) == ""


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("ray", "2.61.0", "Ray 2.60.0 and 2.61.0"),
        ("megatron_core", "0.17.0", "Megatron-Core 0.16.1 and 0.17.0"),
    ],
)
def test_an_image_of_another_release_is_refused(field: str, value: str, named: str) -> None:
    other = replace(ENGINE, **{field: value})
    with pytest.raises(ParityError) as caught:
        check_engines(TRAINER, {"engine-0": ENGINE, "engine-1": other}, nccl=False)
    said = str(caught.value)
    assert said.startswith("the image of engine-1 is of another release") and named in said
    assert "rollout.template.image" in said


def test_a_patch_of_megatron_core_and_an_image_without_it_are_allowed() -> None:
    engines = {"a": replace(ENGINE, megatron_core="0.16.2"), "b": replace(ENGINE, megatron_core="", ray="")}
    assert check_engines(TRAINER, engines, nccl=True) == ""


def test_another_nccl_is_warned_of_where_weights_travel_over_it() -> None:
    engines = {f"engine-{n}": replace(ENGINE, nccl="2.28.9") for n in range(6)}
    said = check_engines(TRAINER, engines, nccl=True)
    assert said.startswith("NCCL 2.30.7 and 2.28.9 in the images of the trainers and of engine-0, engine-1")
    assert "engine-3 and 2 more" in said and "weightSync.transport to staged" in said
    assert check_engines(TRAINER, engines, nccl=False) == ""


def test_another_torch_and_another_sglang_are_warned_of() -> None:
    said = check_engines(
        TRAINER, {"a": ENGINE, "b": replace(ENGINE, torch="2.13.0", sglang="0.5.22")}, nccl=True
    )
    assert "torch 2.14.0a0+4fdf77b940.nv26.08 and 2.13.0 in the images of the trainers and of b" in said
    assert "SGLang 0.5.23 and 0.5.22 in the images of a and of b" in said


def test_ranks_with_different_images_are_refused_by_pod() -> None:
    hosts = [
        RankHost("10.0.0.1", 1, "trainer-0", TRAINER),
        RankHost("10.0.0.2", 1, "trainer-1", replace(TRAINER, nccl="2.29.7")),
    ]
    with pytest.raises(ParityError, match=r"of trainer-0 \(.*\) and trainer-1 .*NCCL 2\.30\.7 and 2\.29\.7"):
        versions_of(hosts)
    assert versions_of(hosts[:1]) == TRAINER and versions_of([]) == Versions()


class _Pool:
    """An agent's status as the controller reads it, and the same config.json for all."""

    def __init__(self, **versions: str) -> None:
        self.table = EngineTable()
        status = {
            "name": "engine-0",
            "state": "SERVING",
            "writer": "job",
            "weightVersion": 3,
            "versions": versions,
        }
        self.table.replace(
            [entry_of(status, "10.0.0.9", "job"), EngineEntry("old", "", EngineState.STALE, 2)]
        )

    def model_configs(self, version: int) -> dict[str, dict[str, object]]:
        return {engine.name: {"hidden_size": 8} for engine in self.table.serving(version)}


class _Gang:
    hf, versions = {"hidden_size": 8}, TRAINER


def test_the_versions_of_an_agent_reach_the_comparison() -> None:
    def check(**versions: str) -> str:
        return check_pool(cast(TrainerGang, _Gang()), cast(RolloutPool, _Pool(**versions)), 3, nccl=True)

    assert check(nccl="2.28.9", unknown="1").startswith("NCCL 2.30.7 and 2.28.9")
    assert check() == "", "an agent of an older release tells no versions"
    with pytest.raises(ParityError, match=r"Ray 2\.60\.0 and 2\.9\.0"):
        check(ray="2.9.0")


def test_an_agent_tells_the_versions_of_its_image() -> None:
    agent = Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1)
    assert entry_of(agent.status(), "10.0.0.9", "job").versions == installed()


class _World(World):
    """A job whose engine serves the first weights with an image of its own."""

    def __init__(self, store: Path, **differing: str) -> None:
        super().__init__(store, steps=1)
        image = replace(ENGINE, **differing)
        self.engines.table.replace([EngineEntry("engine-0", "", EngineState.SERVING, 0, versions=image)])

    def _group(self, pool: object) -> Ranks:
        ranks = super()._group(pool)
        ranks.hosts = [replace(host, versions=TRAINER) for host in ranks.hosts]
        return ranks


def test_a_job_on_images_of_two_releases_fails_with_the_reason(tmp_path: Path) -> None:
    world = _World(tmp_path, ray="2.61.0")
    (tmp_path / "ledger.jsonl").touch()
    world.run()
    status = world.board.get()
    assert status.phase == Phase.FAILED and "Ray 2.60.0 and 2.61.0" in status.message
    assert status.attempt == 1, "another attempt cannot help"


def test_a_job_that_is_warned_runs_and_shows_the_warning_at_first(tmp_path: Path) -> None:
    world = _World(tmp_path, torch="2.13.0")
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED
    first = next(status for status in world.seen if status.phase == Phase.TRAINING)
    assert "torch 2.14.0a0+4fdf77b940.nv26.08 and 2.13.0" in first.message
