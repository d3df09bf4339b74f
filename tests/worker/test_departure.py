"""SIGTERM in the middle of a step, to a real process with real ranks: nothing is lost, and no bit changes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_operator.api.v1alpha1.restart_policy import GRACE_SECONDS
from grpo_operator.render.job_pods import _RANK
from grpo_worker.checkpointing.store import complete_steps
from grpo_worker.controller.training.worker_group import WorkerGroup
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.trainer import TrainerWorker
from grpo_worker.roles.watching import LEAVING
from support.departing import finish, lines_of, start
from support.job_outcome import outcome
from support.ray_gangs import ray_gang

STEPS = 4  # a checkpoint is due after step 4, which is the last one


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finish(start(folder, STEPS)) == f"Succeeded {STEPS}: {STEPS} steps done"
    return outcome(folder)


@pytest.mark.slow  # five runs of a gang; the controller's part is tested with its loop
@pytest.mark.fault(
    row="26",
    point="SIGTERM of the controller during generation, and in the optimizer step",
    witness="the moment is printed before; the end says what was saved",
    compared="all steps and the ledger of an undisturbed run, bitwise",
    bound="60 s, the smallest default of graceSeconds",
    partial="the controller's notice, not a training pod's",
)
@pytest.mark.parametrize(
    ("moment", "saved"), [("generates 2", 2), ("updates 3", 3)], ids=["generation", "update"]
)
def test_a_resumed_job_has_the_bits_of_an_undisturbed_one(
    moment: str, saved: int, undisturbed: Any, tmp_path: Path
) -> None:
    process = start(tmp_path, STEPS)
    lines = lines_of(process)
    assert moment in lines, "the moment never came"
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    checkpoint = f"the checkpoint of step {saved} is complete"
    assert finish(process) == f"Recovering {saved}: the controller's pod is being deleted; {checkpoint}"
    assert time.monotonic() - asked < GRACE_SECONDS, "kubelet would have killed it"
    assert sorted(complete_steps(tmp_path / "job" / "checkpoints")) == [saved]
    assert finish(start(tmp_path, STEPS)) == f"Succeeded {STEPS}: {STEPS} steps done"
    found = outcome(tmp_path)
    assert found[0] == undisturbed[0], "the same samples"
    assert found[1] == undisturbed[1], "the same losses"
    assert found[2] == undisturbed[2], "the same weights"


class Sums(TrainerWorker):
    """A real rank that only sums."""

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        return RankInfo(rank, 0, 0, 0, rank, 1, world)

    @register(Dispatch.ONE_TO_ALL)
    def total(self) -> float:
        value = torch.ones(())
        torch.distributed.all_reduce(value)
        return float(value)


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WorkerGroup]:
    monkeypatch.setenv("GRPO_WEIGHTS_DIR", str(tmp_path))
    with ray_gang(Sums, 2, 60.0) as group:
        yield group


@pytest.mark.fault(
    row="26",
    point="the sign of SIGTERM in a training pod",
    witness="the gang names the pod",
    bound="10 s",
    partial="nothing is saved or compared",
)
def test_ranks_announce_the_end_of_their_pod_and_go_on(gang: WorkerGroup, tmp_path: Path) -> None:
    assert not gang.leaving.done()
    for pid in gang.pids:
        title = Path(f"/proc/{pid}/cmdline").read_text()
        assert title.startswith(_RANK.replace("TrainerWorker", "Sums")), "the shell of the pod looks for it"
    (tmp_path / LEAVING.name).touch()  # as the shell of the pod does at SIGTERM
    assert gang.leaving.result(timeout=10) in gang.hosts
    assert gang.call("total") == [2.0, 2.0], "the checkpoint needs all ranks"
    os.kill(gang.pids[1], signal.SIGKILL)
    gang.died.result(timeout=10)
