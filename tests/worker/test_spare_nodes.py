"""A gang's places on real Ray nodes, of which one more than needed is there."""

import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group_table

from grpo_worker.controller.training.resource_pools import ResourcePoolManager

RANKS = 2  # of each node


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head and three nodes for ranks, with the health checks of a job's head."""
    for name in ("initial_delay", "period", "timeout"):
        monkeypatch.setenv(f"RAY_health_check_{name}_ms", "500")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=0, resources={"trainer": RANKS})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _nodes(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle, as Ray has placed it."""
    places = placement_group_table(group)["bundles_to_node_id"]
    return [places[index] for index in sorted(places)]


def _kill(cluster: Cluster, node_id: str) -> None:
    (node,) = [node for node in cluster.worker_nodes if node.node_id == node_id]
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.fault(
    row="5",
    point="a node of a real Ray cluster is removed",
    witness="the gang's bundles are on the spare node",
    bound="10 s",
    partial="no ranks run; nothing compared",
)
def test_a_spare_node_takes_the_place_of_a_lost_one_and_its_replacement_is_the_spare(
    cluster: Cluster,
) -> None:
    pools = ResourcePoolManager()
    first = _nodes(pools.acquire("trainer", 2 * RANKS))
    (spare,) = pools.spares("trainer")
    assert [first.count(node) for node in set(first)] == [RANKS, RANKS], "the gang fills whole nodes"
    lost, stays = first[0], first[-1]
    pools.release("trainer")
    _kill(cluster, lost)
    shown: list[str] = []
    started = time.monotonic()
    second = _nodes(pools.acquire("trainer", 2 * RANKS, report=shown.append))
    assert set(second) == {stays, spare.id} and pools.spares("trainer") == []
    assert not shown and time.monotonic() - started < 10, "it waited for another node"

    replacement = cluster.add_node(num_cpus=0, resources={"trainer": RANKS})
    cluster.wait_for_nodes()
    pools.release("trainer")  # a rank has crashed, and all nodes live
    assert _nodes(pools.acquire("trainer", 2 * RANKS)) == second, "the gang left nodes that live"
    assert [node.id for node in pools.spares("trainer")] == [replacement.node_id]
    pools.release("trainer")
