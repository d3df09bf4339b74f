"""One devcluster with the operator for all end-to-end tests, and the runs that they compare."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.controlplane import audit_log
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import NAMESPACE, devcluster_values, install_operator
from grpo_devcluster.paths import KUBECONFIG, REPO
from grpo_devcluster.rights import refused, used
from support.jobs import CALM, ENDED, STEPS, Start, apply
from support.runs import Outcome, Undisturbed

OPERATOR = f"system:serviceaccount:{NAMESPACE}:grpo-operator"


@pytest.fixture(scope="session")
def chart_values() -> Iterator[dict[str, Any]]:
    """Values of the chart for a running devcluster, which is gone afterwards."""
    yield devcluster_values(cluster.up())
    cluster.down()


@pytest.fixture(scope="session")
def kubeconfig(chart_values: dict[str, Any]) -> Iterator[Path]:
    """A running devcluster with the operator in it, to which the API server must refuse nothing."""
    before = sum(1 for _ in audit_log())  # of another run, if the devcluster has been running
    install_operator(KUBECONFIG, chart_values)
    yield KUBECONFIG
    log = list(islice(audit_log(), before, None))
    assert used(log, OPERATOR), "the audit log shows the operator"
    assert sorted(map(str, refused(log, OPERATOR))) == [], "the operator lacks rights"


@pytest.fixture(scope="session")
def start(kubeconfig: Path) -> Start:
    """Apply the tiny job under another name, with changes to its spec.

    ``spares``: trainer.spareNodes. ``engines``: number of them, if not two. ``prompts``: of a step and of its
    update, if not eight. ``change``: changes the spec in place.
    """
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())

    def begin(
        name: str, steps: int = STEPS, lr: float | None = None, spares: int = 0, engines: int = 0,
        prompts: int = 0, change: Callable[[dict[str, Any]], None] | None = None, **spec: Any,
    ) -> JobView:  # fmt: skip
        job = copy.deepcopy(manifest)
        job["metadata"]["name"] = name
        job["spec"] |= {"totalSteps": steps} | spec
        if lr is not None:
            job["spec"]["trainer"]["optimizer"]["lr"] = lr
        if spares:
            job["spec"]["trainer"]["spareNodes"] = spares
        if prompts:
            job["spec"]["data"]["trainBatchSize"] = job["spec"]["trainer"]["miniBatchSize"] = prompts
        if engines:
            job["spec"]["rollout"]["template"]["replicas"] = engines
        if change is not None:
            change(job["spec"])
        command = ["kubectl", "apply", "-f", "-"]
        apply(kubeconfig, yaml.safe_dump(job), *command[1:])
        return JobView(kubeconfig, name)

    return begin


@pytest.fixture(scope="session")
def calm(start: Start) -> Outcome:
    """Records and ledger of a short run that nobody disturbs."""
    job = start("calm", steps=CALM)
    status = job.wait(ENDED, 1200)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": 0}, status
    outcome = Outcome.of(job.store(), CALM)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    return outcome


@pytest.fixture(scope="session")
def undisturbed(start: Start) -> Undisturbed:
    """A whole run that nobody disturbs: what the others are compared with."""
    return Undisturbed(start)
