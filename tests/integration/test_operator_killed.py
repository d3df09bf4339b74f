"""SIGKILL of the operator at each of its writes: its successor finishes the work."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.operator_process import operator_process
from support.api_proxy import ApiProxy
from support.api_server import Api, until

KINDS = "configmaps,services,poddisruptionbudgets,networkpolicies,rolloutpools,rayclusters"


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """The tests start and kill operators of their own."""


def _children(api: Api, job: str) -> list[tuple[str, str]]:
    items = api.get(KINDS, "-l", f"rl.grpo.dev/job={job}")["items"]
    return sorted((i["kind"], i["metadata"]["name"].replace(job, "JOB")) for i in items)


def _phase(api: Api, job: str) -> str | None:
    phase: str | None = api.get("grpojob", job).get("status", {}).get("phase")
    return phase


def _suspended(tiny: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a job with all children but no pods, so that many can be created."""
    return tiny | {"metadata": {"name": name}, "spec": tiny["spec"] | {"suspend": True}}


@pytest.mark.fault(
    row="19",
    point="SIGKILL of the operator before each of its writes in turn",
    witness="killed at that write",
    bound="whole in 90 s",
    compared="children of a job whose operator was not killed",
)
@pytest.mark.slow
def test_an_operator_killed_at_any_write_is_resumed_by_the_next(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any, tmp_path: Path
) -> None:
    fake_nodes(2)
    with operator_process(tmp_path, proxy.kubeconfig):
        assert api.apply(_suspended(tiny, "whole")).returncode == 0
        until("Suspended", lambda: _phase(api, "whole") == "Suspended", 60)
        until("all children", lambda: len(_children(api, "whole")) >= 5, 30)
        wanted, total = _children(api, "whole"), proxy.writes
    assert total >= 6
    for number in range(1, total + 1):
        name = f"killed-{number}"
        _create_and_kill(api, proxy, _suspended(tiny, name), number, tmp_path)
        _finish(api, proxy, name, wanted, tmp_path)
        api.ok("delete", "grpojob", name)


def _create_and_kill(api: Api, proxy: ApiProxy, job: dict[str, Any], number: int, folder: Path) -> None:
    """Create the job, and kill its operator right before its ``number``-th write."""
    killed_at: list[int] = []
    with operator_process(folder, proxy.kubeconfig) as process:
        proxy.writes = 0

        def kill(write: int) -> None:
            if write == number:
                os.kill(process.pid, signal.SIGKILL)
                killed_at.append(write)

        proxy.before_write = kill
        assert api.apply(job).returncode == 0
        until(f"killed at write {number}", lambda: process.poll() is not None, 60)
    proxy.before_write = None
    assert killed_at == [number]


def _finish(api: Api, proxy: ApiProxy, name: str, children: list[tuple[str, str]], folder: Path) -> None:
    """Start another operator and wait until it has made the same children."""
    with operator_process(folder, proxy.kubeconfig):
        until("Suspended", lambda: _phase(api, name) == "Suspended", 60)
        until("the same children", lambda: _children(api, name) == children, 30)
