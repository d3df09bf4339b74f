"""Weight synchronizers: who waits for a pushed version, and who holds the GPUs meanwhile."""

from pathlib import Path
from typing import cast

import pytest

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_worker.controller.config import pool_timeout
from grpo_worker.controller.main import choose_synchronizer
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.controller.weight_sync.colocated import ColocatedSynchronizer
from grpo_worker.controller.weight_sync.dedicated import DedicatedSynchronizer
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.transfer_fakes import A, FakeEngines, FakeTrainers

DIRECT, STAGED = WeightPath(direct=Backend.GLOO), WeightPath()
EVERYTHING = "hold kv_cache weights"
SEVEN = Version(7)


def dedicated(trainers: FakeTrainers, engines: FakeEngines, path: WeightPath = DIRECT) -> WeightSynchronizer:
    return DedicatedSynchronizer(trainers, engines, path, WeightSyncSpec(), 1.0)


def test_engines_generate_while_a_version_is_staged_for_late_ones() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    engines.serving = True
    synchronizer = dedicated(trainers, engines)
    pushed = synchronizer.push(SEVEN)
    synchronizer.after_push(pushed)
    assert synchronizer.served == 7
    assert not pushed.done() and engines.target is None, "no engine may read a version that is not staged"
    trainers.staging_may_end.set()
    result = pushed.result(10)
    assert result.digests == ["digest-0", "digest-1"]
    assert engines.target and engines.target.version == 7 and engines.target.gang
    assert result.metrics["weight_sync/link_failures"] == 0
    assert {"timing_s/update_weights_link", "timing_s/update_weights_publish"} <= result.metrics.keys()


@pytest.mark.parametrize("fault", ["no direct path", "the transfer fails", "too few engines"])
def test_without_enough_engines_after_a_direct_transfer_the_loop_waits(fault: str) -> None:
    """A version that engines still serve from an earlier attempt does not count either."""
    trainers, engines = FakeTrainers(), FakeEngines(A)
    engines.serving = fault != "too few engines"
    if fault == "the transfer fails":
        engines.answers["a"] = {"error": "peer is gone"}
    trainers.staging_may_end.set()
    path = STAGED if fault == "no direct path" else DIRECT
    synchronizer = dedicated(trainers, engines, path)
    pushed = synchronizer.push(SEVEN)
    synchronizer.after_push(pushed)
    assert pushed.done() and engines.target and engines.target.version == 7
    assert ("weight_sync/link_failures" in pushed.result().metrics) == (fault != "no direct path")


def test_a_rank_that_dies_while_staging_is_reported_by_the_future() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    engines.serving = trainers.dies = True
    pushed = dedicated(trainers, engines).push(SEVEN)
    trainers.staging_may_end.set()
    with pytest.raises(GangError, match="a rank is gone"):
        pushed.result(10)
    assert engines.target is None


def test_dedicated_gpus_are_never_handed_over() -> None:
    events: list[str] = []
    synchronizer = dedicated(FakeTrainers(events), FakeEngines(A, events=events))
    timer = StepTimer()
    synchronizer.before_trainers_start(events.append)
    synchronizer.before_generation(timer)
    synchronizer.before_training(timer)
    assert not events and not timer.seconds and synchronizer.served is None


def test_gpus_alternate_between_trainers_and_engines() -> None:
    events: list[str] = []
    trainers, engines = FakeTrainers(events), FakeEngines(A, events=events)
    synchronizer: WeightSynchronizer = ColocatedSynchronizer(trainers, engines, STAGED, WeightSyncSpec(), 1.0)
    reports: list[str] = []
    synchronizer.before_trainers_start(reports.append)
    assert events == [EVERYTHING, "hold nothing"], "engines start before the ranks"
    assert reports == ["waiting for the engines, which start before the ranks"]
    synchronizer.after_trainers_start()
    pushed, timer = synchronizer.push(SEVEN), StepTimer()
    assert pushed.result().digests == ["digest-0", "digest-1"] and synchronizer.served is None
    for _ in range(2):  # the second call finds the engines ready
        synchronizer.before_generation(timer)
        assert synchronizer.served == 7
    assert events[2:] == [
        "publish_weights",
        "empty_cache",
        "hold weights",
        "serve 7",
        "empty_cache",
        EVERYTHING,
    ]
    assert timer.seconds["perf/waiting_memory_reserved_gb"] == 3, "of the rank that reserves most"
    for _ in range(2):
        synchronizer.before_training(timer)
    assert events[8:] == ["hold nothing"]
    assert {
        "timing_s/to_engines",
        "timing_s/to_trainers",
        "timing_s/update_weights_pull",
    } <= timer.seconds.keys()
    synchronizer.before_trainers_start(reports.append)
    assert events[9:] == [EVERYTHING, "hold nothing"], "a new attempt does not know what the engines hold"


def test_a_colocated_direct_transfer_runs_while_engines_hold_weights_only() -> None:
    events: list[str] = []
    trainers, engines = FakeTrainers(events), FakeEngines(A, events=events)
    path = WeightPath(direct=Backend.CUDA_IPC)
    synchronizer = ColocatedSynchronizer(trainers, engines, path, WeightSyncSpec(), 1.0)
    synchronizer.before_trainers_start(lambda _: None)
    synchronizer.push(SEVEN)
    synchronizer.before_generation(StepTimer())
    assert events.index("hold weights") < events.index("send_weights") < events.index("serve 7")
    assert engines.target and engines.target.gang
    synchronizer.before_training(StepTimer())
    (link,) = trainers.sent[-1]
    trainers.problems = {link: "peer is gone"}
    synchronizer.push(Version(8))
    timer = StepTimer()
    synchronizer.before_generation(timer)
    assert engines.target.version == 8 and not engines.target.gang, "the staged version is complete"
    assert timer.seconds["weight_sync/link_failures"] == 1


def test_the_pool_has_time_for_several_updates_of_one_engine() -> None:
    assert pool_timeout(WeightSyncSpec(timeout_seconds=20)) == 80


def test_the_job_file_names_the_path() -> None:
    assert JobConfig.model_fields["weight_path"].is_required(), "a default would hide a mistake"


@pytest.mark.parametrize(("shared", "kind"), [(True, ColocatedSynchronizer), (False, DedicatedSynchronizer)])
def test_the_implementation_is_chosen_by_the_gpus(shared: bool, kind: type) -> None:
    manifest = job(mode="colocated")
    spec = manifest["spec"]
    spec["rollout"]["template"] |= {"replicas": 1, "minAvailable": 1}
    if shared:
        offload = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
        spec["trainer"] |= {"device": "cuda", "offload": offload}
        spec["rollout"]["template"]["engine"]["device"] = "cuda"
    config = JobConfig(
        name="j",
        namespace="default",
        spec=spec_of(manifest),
        rollout_service="service",
        min_available=1,
        fp8=False,
        weight_path=STAGED,
        writer="j-1",
        store=Path("store"),
    )
    chosen = choose_synchronizer(config, cast(TrainerGang, FakeTrainers()), cast(RolloutPool, FakeEngines()))
    assert type(chosen) is kind
