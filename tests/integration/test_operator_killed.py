"""SIGKILL of the operator at each of its writes: the next one finishes what was begun."""

import os
import signal
from typing import Any

import pytest
from support.api_server import Api, until

from grpo_devcluster.operator_process import operator_process
from support.fault_proxy import FaultProxy

KINDS = "configmaps,services,poddisruptionbudgets,networkpolicies,rolloutpools,rayclusters"


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """The tests start, and kill, their own."""


def _children(api: Api, job: str) -> list[tuple[str, str]]:
    items = api.get(KINDS, "-l", f"rl.grpo.dev/job={job}")["items"]
    return sorted((i["kind"], i["metadata"]["name"].replace(job, "JOB")) for i in items)


def _phase(api: Api, job: str) -> str | None:
    return api.get("grpojob", job).get("status", {}).get("phase")


def _suspended(tiny: dict[str, Any], name: str) -> dict[str, Any]:
    """A job that makes all its children but no pod, so that many can be tried."""
    return tiny | {"metadata": {"name": name}, "spec": tiny["spec"] | {"suspend": True}}


def test_killed_at_every_write_the_operator_finishes_the_same_job(
    api: Api, proxy: FaultProxy, tiny: dict[str, Any], fake_nodes: Any, tmp_path: Any
) -> None:
    fake_nodes(2)
    with operator_process(tmp_path, proxy.kubeconfig):
        assert api.apply(_suspended(tiny, "whole")).returncode == 0
        until("Suspended", lambda: _phase(api, "whole") == "Suspended", 60)
        until("all children", lambda: len(_children(api, "whole")) >= 5, 30)
        wanted, total = _children(api, "whole"), proxy.writes
    assert total >= 6
    for number in range(1, total + 1):
        name, killed = f"killed-{number}", []
        with operator_process(tmp_path, proxy.kubeconfig) as process:
            proxy.writes = 0

            def kill(write: int, at: int = number, pid: int = process.pid, to: Any = killed) -> None:
                if write == at:
                    os.kill(pid, signal.SIGKILL)
                    to.append(write)

            proxy.before_write = kill
            assert api.apply(_suspended(tiny, name)).returncode == 0
            until(f"killed at write {number}", lambda p=process: p.poll() is not None, 60)
        proxy.before_write = None
        with operator_process(tmp_path, proxy.kubeconfig):
            until("Suspended", lambda n=name: _phase(api, n) == "Suspended", 60)
            until("the same children", lambda n=name: _children(api, n) == wanted, 30)
        assert killed == [number]
        api.ok("delete", "grpojob", name)
