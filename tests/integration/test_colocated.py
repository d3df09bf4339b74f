"""Engines beside the training pods, on their GPUs: real API server, scheduler and KubeRay, KWOK nodes."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_operator.plan.capacity.feasibility import GPU
from support.api_server import POOL, Api, running, until

OFFLOAD = dict.fromkeys(("parameters", "gradients", "optimizer"), True)


def colocated(tiny: dict[str, Any], gpus: int = 8) -> dict[str, Any]:
    """Return the tiny job on two nodes, with ``gpus`` GPUs of each."""
    spec = tiny["spec"]
    spec["mode"] = "colocated"
    spec["trainer"] |= {"device": "cuda", "gpusPerNode": gpus, "offload": dict(OFFLOAD)}
    spec["trainer"] |= {"microBatchSizePerGpu": 1}
    spec["rollout"]["template"]["engine"] = {
        "device": "cuda", "tensorParallel": gpus, "gpusPerNode": gpus, "attentionDataParallel": gpus,
        "contextLength": 256,
    }  # fmt: skip
    return tiny


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("rollout", {"poolRef": {"name": "shared"}}, "engines of a RolloutPool have GPUs of their own"),
        ("rollout.template.replicas", 3, "must not exceed trainer.nodes"),
        ("rollout.template.engine.gpusPerNode", 4, "and, on cuda, trainer.gpusPerNode"),
        ("trainer.offload.gradients", False, "needs trainer.offload"),
        ("staleness", {"maxVersionLag": 1}, "requires staleness.maxVersionLag 0"),
        ("weightSync", {"transport": "nccl"}, "excludes weightSync.transport nccl"),
        (
            "weightSync",
            {"transport": "cuda-ipc"},
            "cuda-ipc needs mode colocated on cuda and trainer.nodes 1",
        ),
    ],
)
def test_an_invalid_job_is_refused_at_apply(
    api: Api, tiny: dict[str, Any], path: str, value: Any, text: str
) -> None:
    manifest = colocated(tiny)
    *parents, last = path.split(".")
    target = manifest["spec"]
    for part in parents:
        target = target[part]
    target[last] = value
    if last == "gpusPerNode":
        target["tensorParallel"] = target["attentionDataParallel"] = value
    done = api.apply(manifest)
    assert done.returncode != 0 and text in done.stderr, done.stderr


def test_engines_run_beside_the_ranks_whose_gpus_they_share(
    api: Api, tiny: dict[str, Any], fake_nodes: Callable[[int], None]
) -> None:
    fake_nodes(4)
    assert api.apply(colocated(tiny)).returncode == 0
    until("all pods run", lambda: running(api)["trainer"] == running(api)["rollout"] == 2, 90)
    pods = api.get("pods")["items"]
    where = {
        pool: sorted(p["spec"]["nodeName"] for p in pods if p["metadata"]["labels"][POOL] == pool)
        for pool in ("trainer", "rollout")
    }
    assert where["trainer"] == where["rollout"] and len(set(where["trainer"])) == 2
    asked = [c["resources"].get("limits", {}).get(GPU) for p in pods for c in p["spec"]["containers"]]
    assert sorted(filter(None, asked)) == ["8", "8"]
    changed = api.run("patch", "grpojob", "tiny-moe", "--type=merge", "-p", '{"spec": {"mode": "static"}}')
    assert changed.returncode != 0 and "mode is fixed" in changed.stderr


def test_colocation_needs_all_gpus_of_a_node(
    api: Api, tiny: dict[str, Any], fake_nodes: Callable[[int], None]
) -> None:
    fake_nodes(2)
    assert api.apply(colocated(tiny, gpus=4)).returncode == 0

    def stalled() -> str:
        conditions = (api.get("grpojob", "tiny-moe").get("status") or {}).get("conditions", [])
        return next((c["message"] for c in conditions if c["type"] == "Stalled"), "")

    until("the job is refused", lambda: "set trainer.gpusPerNode to 8" in stalled())
    assert not api.get("pods")["items"]
