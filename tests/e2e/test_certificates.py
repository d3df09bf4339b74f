"""The certificates of a job, their private key and their CA are replaced while its weights are updated."""

import itertools
import json
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT, TRUSTED
from support.faults import until
from support.jobs import CALM, ENDED, Start, apply
from support.runs import Outcome
from support.user_authority import UserAuthority, serial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NAME, SECRET = "certificates", "certificates-of-a-user"
SEEN = 120.0  # seconds until a pod has the files that it was given
PORTS = {"trainer": [AGENT_PORT], "rollout": [AGENT_PORT, ENGINE_PORT], "controller": [CONTROLLER_PORT]}
_NUMBERS = itertools.count(1)
AGENT = {"controller": "controller"}  # a container that has the files; "agent" in other pods


@pytest.mark.fault(
    row="key-rotation",
    point="certificate and private key, then the CA, of a job with TLS are replaced; its pods get the files "
    "in different steps, between which weights are updated",
    witness="serial numbers that all ports present, files of all pods, and steps between the first pod and "
    "the last",
    bound="each pod has them in 120 s; no restart",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_certificates_and_their_ca_are_replaced_during_updates(
    kubeconfig: Path, start: Start, calm: Outcome
) -> None:
    old, new = UserAuthority("old"), UserAuthority("new")
    domain = f"{NAME}.default.grpo"
    _give(kubeconfig, old.issue(domain))
    trusted = {"secretName": SECRET, "caBundle": old.certificate}
    job = start(NAME, steps=CALM, scheduling={"tls": trusted})
    until("three steps", lambda: job.status().get("step", 0) >= 3, 900)

    _replace_certificate(job, kubeconfig, old.issue(domain))
    _trust(job, old.certificate + new.certificate)
    _replace_certificate(job, kubeconfig, new.issue(domain))
    _trust(job, new.certificate)
    until("two steps with the new CA alone", _steps_after(job, 2), 240)

    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded", status
    assert status["restarts"] == {"job": 0, "infrastructure": 0}, status
    Outcome.of(job.store(), CALM).assert_same(calm)


def _give(kubeconfig: Path, content: dict[str, str]) -> None:
    meta = {"name": SECRET, "namespace": "default"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": content}
    apply(kubeconfig, json.dumps(secret), "apply", "-f", "-")


def _replace_certificate(job: JobView, kubeconfig: Path, content: dict[str, str]) -> None:
    """Replace certificate and key; return when all ports present the new one."""
    _give(kubeconfig, content)
    expected = serial(content["tls.crt"])

    def presented(pool: str, pod: dict[str, Any]) -> bool:
        address = pod["status"]["podIP"]
        return all(
            serial(ssl.get_server_certificate((address, port), timeout=5)) == expected for port in PORTS[pool]
        )

    _one_pod_after_another(job, presented)


def _trust(job: JobView, bundle: str) -> None:
    """Replace the CAs that all pods trust; return when all have the file."""
    patch = {"spec": {"scheduling": {"tls": {"caBundle": bundle}}}}
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", json.dumps(patch))
    config = f"{job.name}-tls"

    def in_the_config_map() -> bool:
        found = json.loads(job.kubectl("get", "configmap", config, "-o", "json"))
        return bool(found["data"][TRUSTED].strip() == bundle.strip())

    def has(pool: str, pod: dict[str, Any]) -> bool:
        container = AGENT.get(pool, "agent")
        file = f"/etc/grpo-tls/{TRUSTED}"
        return job.exec(pod["metadata"]["name"], container, "cat", file).strip() == bundle.strip()

    until("the operator passes the CAs on", in_the_config_map, SEEN)
    _one_pod_after_another(job, has)


def _one_pod_after_another(job: JobView, has: Callable[[str, dict[str, Any]], bool]) -> None:
    """Let each pod have its files a step after the pod before; an annotation makes kubelet look at once."""
    first = job.status()["step"]
    for pool in PORTS:
        for pod in job.pods(pool):
            job.kubectl("annotate", "pod", pod["metadata"]["name"], f"poke={next(_NUMBERS)}", "--overwrite")
            until(f"{pod['metadata']['name']} has the files", partial(has, pool, pod), SEEN)
            until("a step with the files", _steps_after(job, 1), 240)
    last = job.status()["step"]
    assert first < last < CALM, "no update was under way"


def _steps_after(job: JobView, steps: int) -> Callable[[], bool]:
    """Return a check that is true when so many further steps have ended."""
    wanted = job.status()["step"] + steps
    return lambda: bool(job.status()["step"] >= wanted)
