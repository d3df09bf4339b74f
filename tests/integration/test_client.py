"""The Python client against a real API server and the operator."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from kubernetes.client import ApiException

from grpo_devcluster.paths import KUBECONFIG
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.client import AsyncGRPOClient, GRPOClient, JobFailedError
from support.api_server import WHOLE, Api, lose_controller, running, until


@pytest.fixture
def grpo(api: Api) -> GRPOClient:
    return GRPOClient(kubeconfig=str(KUBECONFIG))


def _end(api: Api, name: str, **status: Any) -> None:
    change = json.dumps({"status": status})
    api.ok("patch", "grpojob", name, "--subresource=status", "--type=merge", "-p", change)


def test_a_job_is_created_followed_and_waited_for(
    api: Api, grpo: GRPOClient, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    spec = GRPOJobSpec.model_validate(tiny["spec"])
    created = grpo.create("tiny-moe", spec, labels={"team": "a"})
    assert (created.namespace, created.phase, created.spec) == ("default", "", spec)
    assert grpo.wait("tiny-moe", "Starting", seconds=60).status.layout is not None
    until("all pods run", lambda: running(api) == WHOLE, 60)
    assert [job.name for job in grpo.jobs("team=a")] == ["tiny-moe"] and grpo.jobs("team=b") == []
    with pytest.raises(TimeoutError, match="tiny-moe is Starting, not Succeeded"):
        grpo.wait("tiny-moe", seconds=1)
    grpo.suspend("tiny-moe")
    lose_controller(api, "tiny-moe")  # KWOK's pods answer nothing
    grpo.wait("tiny-moe", "Suspended", seconds=60)
    with pytest.raises(LookupError, match="/store/default-tiny-moe-"):
        grpo.metrics("tiny-moe")
    phases: list[str] = []
    follower = threading.Thread(target=lambda: phases.extend(job.phase for job in grpo.follow("tiny-moe")))
    follower.start()
    time.sleep(1)
    api.ok("uncordon", "fake-0", "fake-1")
    grpo.resume("tiny-moe")
    until("all pods run again", lambda: running(api) == WHOLE, 60)
    _end(api, "tiny-moe", phase="Succeeded", step=spec.total_steps)
    follower.join(30)
    assert phases[0] == "Suspended" and phases[-1] == "Succeeded" and "Starting" in phases
    fork = grpo.fork("tiny-moe", "second", changes={"trainer.optimizer.lr": 5e-7})
    assert fork.spec.trainer.optimizer.lr == 5e-7
    grpo.delete("second")


def test_what_cannot_run_is_an_error_with_the_operators_message(
    grpo: GRPOClient, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(1)
    with pytest.raises(ValueError, match="totalSteps"):
        grpo.create("tiny-moe", tiny["spec"] | {"totalSteps": 0})
    with pytest.raises(ApiException, match="not found"):
        grpo.get("nobody")
    tiny["spec"]["trainer"]["resources"] = {"cpu": "400", "memory": "64Gi"}
    grpo.create("tiny-moe", tiny["spec"])
    with pytest.raises(JobFailedError, match=r"tiny-moe is Invalid: .*400.05 CPU") as caught:
        grpo.wait("tiny-moe", seconds=60)
    assert caught.value.job.status.reason == "Infeasible"
    with pytest.raises(ValueError, match="its phase is Invalid"):
        grpo.resume("tiny-moe")


def test_the_asynchronous_client_does_the_same(
    api: Api, grpo: GRPOClient, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)

    async def run() -> list[str]:
        client = AsyncGRPOClient(kubeconfig=str(KUBECONFIG))
        await client.create("tiny-moe", tiny["spec"])
        await client.wait("tiny-moe", "Starting", seconds=60)
        _end(api, "tiny-moe", phase="Failed", step=3)
        return [job.phase async for job in client.follow("tiny-moe")]

    assert asyncio.run(run())[-1] == "Failed"
