"""A job with ``scheduling.tls``: it trains, no port speaks plain HTTP, no token is read on the network."""

from typing import Any

import httpx
import pytest

from grpo_devcluster.follow import JobView
from grpo_operator.api.names import AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT, tls_config, tls_secret
from support.faults import until
from support.jobs import ENDED, Start
from support.wire import listening

PORTS = frozenset({AGENT_PORT, CONTROLLER_PORT, ENGINE_PORT})
STEPS = 6
TOKEN = b"Bearer "

pytestmark = pytest.mark.slow


def _ended(job: JobView) -> dict[str, Any]:
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded" and status["step"] == STEPS, status
    return status


def _refuses_http(address: str, port: int) -> bool:
    """Return whether a port breaks a plain request off."""
    try:
        httpx.get(f"http://{address}:{port}/healthz", timeout=5)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return True
    return False


def test_tokens_are_on_the_network_without_tls(start: Start) -> None:
    """The measurement of the next test finds what it looks for."""
    with listening(PORTS, TOKEN) as wire:
        _ended(start("plain", steps=STEPS))
    assert wire.clear


def test_a_job_with_tls_shows_no_token(start: Start) -> None:
    with listening(PORTS, TOKEN) as wire:
        job = start("tls", steps=STEPS, scheduling={"tls": {}})
        until("the controller trains", lambda: job.status().get("step", 0) >= 1, 300)
        served = {
            "controller": [CONTROLLER_PORT],
            "trainer": [AGENT_PORT],
            "rollout": [AGENT_PORT, ENGINE_PORT],
        }
        for pool, ports in served.items():
            for pod in job.pods(pool):
                for port in ports:
                    assert _refuses_http(pod["status"]["podIP"], port), (pod["metadata"]["name"], port)
        assert all(engine["endpoint"].startswith("https://") for engine in job.pool()["engines"])
        job.kubectl("get", "secret", tls_secret(job.get()))
        job.kubectl("get", "configmap", tls_config("tls"))
        status = _ended(job)
    assert status.get("restarts", {}).get("job", 0) == 0
    assert wire.all > 100 and not wire.clear, wire.clear[0][:400]
