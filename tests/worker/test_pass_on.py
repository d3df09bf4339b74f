"""A batch in Ray's object stores of three nodes: the second pod fetches the ids from the first one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations
from ray.util.placement_group import placement_group

from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch
from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.worker_group import GangError, WorkerGroup
from grpo_worker.roles.dispatch import Columns, Dispatch, RankInfo, register
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.shared_batch import SharedBatch
from grpo_worker.roles.trainer import TrainerWorker

STORE = 100 << 20  # bytes of each node
ROWS, LENGTH = 4, 1 << 18


class Reader(TrainerWorker):
    """A real rank that answers with the ids that it got."""

    def node(self) -> RankHost:
        return RankHost(ray.get_runtime_context().get_node_id(), os.getpid())

    def stand_at(self, info: RankInfo) -> str:
        self.rank_info = info
        return self.node().address

    def await_file(self, file: str) -> str:
        while not os.path.exists(file):
            time.sleep(0.05)
        return self.node().address

    @register(Dispatch.MEGATRON_COMPUTE, (INPUT_IDS,))
    def log_probs(self, batch: RaggedBatch) -> Columns:
        assert batch.input_ids is not None, "both stages read the ids"
        return Columns({"ids": batch.response_of(batch.input_ids)})


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    """Yield two pipeline stages, each on a node of its own; the controller is on a third one."""
    monkeypatch.setenv("PYTHONPATH", f"{os.path.dirname(__file__)}:{os.environ.get('PYTHONPATH', '')}")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"trainer": 1}, object_store_memory=STORE)
        ray.init(address=cluster.address, log_to_driver=False)
        pool = placement_group([{"trainer": 1}] * 2, strategy="STRICT_SPREAD")
        processes = RayProcesses(Reader, pool)
        group = WorkerGroup(Reader, processes, 60.0)
        group.ranks = [RankInfo(rank, 0, rank, 0, 0, 2, 1) for rank in range(2)]
        places = [group._remote(info.rank, "stand_at", info) for info in group.ranks]
        assert ray.get(places) == group.addresses and len(set(group.addresses)) == 2
        yield group
        group.kill()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _places(references: list[Any], missing: str) -> list[set[str]]:
    """Return the nodes that hold objects, when ``missing`` is among those of the last one."""
    deadline = time.monotonic() + 30
    while True:
        known = get_object_locations(references)
        found = [set(known[reference]["node_ids"]) for reference in references]
        if missing in found[-1]:
            return found
        assert time.monotonic() < deadline, f"{missing} holds nothing: {found}"
        time.sleep(0.1)


def test_the_last_stage_fetches_the_ids_from_the_pod_of_the_first_one(group: WorkerGroup) -> None:
    lengths = np.full(ROWS, LENGTH, np.int32)
    batch = RaggedBatch(lengths // 2, lengths, LENGTH, np.arange(ROWS * LENGTH, dtype=np.int32))
    shared: SharedBatch = group.share(batch, ROWS)
    for _ in range(2):
        found = group.call("log_probs", shared.all())
        assert batch.input_ids is not None
        np.testing.assert_array_equal(found.response["ids"], batch.response_of(batch.input_ids))
    first, last = (shared.all().arguments(info, (INPUT_IDS,))[1][1] for info in group.ranks)
    head = ray.get_runtime_context().get_node_id()
    original, copy = _places([first, last], group.addresses[1])
    assert original == {head, group.addresses[0]}, "the controller's pod sends the ids to one pod"
    assert copy == set(group.addresses)


@pytest.mark.slow
def test_work_that_waits_beside_the_calls_holds_up_none(group: WorkerGroup, tmp_path: Path) -> None:
    wait = group.beside("await_file", str(tmp_path / "store"))
    lengths = np.full(ROWS, 4, np.int32)
    shared = group.share(RaggedBatch(lengths // 2, lengths, 4, np.arange(16, dtype=np.int32)), ROWS)
    assert group.call("log_probs", shared.all()).response["ids"].tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    (tmp_path / "store").touch()
    assert wait() == group.addresses == wait()


@pytest.mark.slow
def test_the_end_of_a_rank_ends_the_wait_for_work_beside_its_calls(
    group: WorkerGroup, tmp_path: Path
) -> None:
    wait = group.beside("await_file", str(tmp_path / "store"))
    group.kill()
    with pytest.raises(GangError, match="await_file"):
        wait()
