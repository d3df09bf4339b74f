"""The agent's process with the NVML shim: findings for the operator, and metrics."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.nvml_shim import DEGRADED, NvmlShim

HEALTHY = ("gpus 2", "0 uuid GPU-a", "1 uuid GPU-b", "0 temperature 40", "0 link0 1", "0 link0_errors0 7")


class Agent:
    """A trainer's agent that reads the GPUs ten times a second."""

    def __init__(self, folder: Path, environment: dict[str, str] | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self.log = folder / "agent.log"
        command = [
            sys.executable, "-m", "grpo_worker.weightsync.main", "trainer", "--host", "127.0.0.1",
            "--port", str(port), "--weights", str(folder), "--gpu-seconds", "0.1",
        ]  # fmt: skip
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self.until(lambda: self.get("/healthz") is not None)

    def get(self, path: str) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(self._url + path).raise_for_status().text
        except httpx.TransportError:
            return None

    def report(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self._url}/v1/gpus").json())

    def until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not check():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> NvmlShim:
    made = NvmlShim(tmp_path_factory.mktemp("nvml"))
    made.set(*HEALTHY)
    return made


@pytest.fixture(scope="module")
def agent(shim: NvmlShim, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    started = Agent(tmp_path_factory.mktemp("agent"), shim.environment)
    yield started
    started.process.kill()
    started.process.wait()


def test_a_healthy_node_reports_no_finding_and_exports_what_its_gpus_support(agent: Agent) -> None:
    assert agent.report() == {"gpus": 2, "findings": []}
    metrics = agent.get("/metrics") or ""
    assert 'grpo_gpu_health{gpu="GPU-b",index="1"} 0.0' in metrics
    assert 'grpo_gpu_temperature_celsius{gpu="GPU-a",index="0"} 40.0' in metrics
    assert 'grpo_gpu_nvlink_replays_total{gpu="GPU-a",index="0",link="0"} 7.0' in metrics
    assert 'grpo_gpu_temperature_celsius{gpu="GPU-b"' not in metrics, "unsupported is left out"
    assert "grpo_gpu_remap_failed{" not in metrics


def test_counters_and_lost_gpus_become_findings_and_vanish_with_their_cause(
    agent: Agent, shim: NvmlShim
) -> None:
    shim.set(
        *HEALTHY, "0 ecc_volatile 2", "0 remapped_rows 1", "0 remap_pending 1", "0 remap_failed 1", "1 lost 1"
    )

    def found() -> list[tuple[str, str, str]]:
        return sorted((f["gpu"], f["severity"], f["reason"]) for f in agent.report()["findings"])

    agent.until(lambda: len(found()) == 4)
    assert found() == [
        ("GPU-a", "Degraded", "EccUncorrectable"),
        ("GPU-a", "Degraded", "RemapPending"),
        ("GPU-a", "Sick", "RemapFailed"),
        ("GPU-b", "Sick", "GpuLost"),
    ]
    assert 'grpo_gpu_ecc_uncorrected_volatile_total{gpu="GPU-a",index="0"} 2.0' in (
        agent.get("/metrics") or ""
    )
    shim.set(*HEALTHY)
    agent.until(lambda: found() == [])
    shim.set(*(line for line in HEALTHY if line != "0 link0 1"), "0 link0 0")
    agent.until(lambda: found() == [("GPU-a", "Sick", "NvLinkDown")])
    shim.set(*HEALTHY)
    agent.until(lambda: found() == [])


def test_xids_arrive_as_nvmls_events(agent: Agent, shim: NvmlShim) -> None:
    shim.set(*HEALTHY, "xid 1 31", "xid 1 79")
    agent.until(lambda: bool(agent.report()["findings"]))
    (finding,) = agent.report()["findings"]
    assert (finding["gpu"], finding["index"], finding["severity"]) == ("GPU-b", 1, "Sick")
    assert finding["reason"] == "Xid79" and abs(finding["since"] - time.time()) < 60
    metrics = agent.get("/metrics") or ""
    assert 'grpo_gpu_health{gpu="GPU-b",index="1"} 2.0' in metrics
    for code in (31, 79):
        assert f'grpo_gpu_xid_errors_total{{gpu="GPU-b",index="1",xid="{code}"}} 1.0' in metrics


def test_a_degraded_gpu_has_the_series_that_the_dashboards_ask_for(tmp_path: Path) -> None:
    """The job of the test with Prometheus has this GPU."""
    shim = NvmlShim(tmp_path)
    shim.set(*DEGRADED)
    agent = Agent(tmp_path, shim.environment)
    try:
        (finding,) = agent.report()["findings"]
        assert (finding["severity"], finding["reason"]) == ("Degraded", "PcieNarrow")
        metrics = agent.get("/metrics") or ""
        assert 'grpo_gpu_health{gpu="GPU-narrow",index="0"} 1.0' in metrics
        assert 'grpo_gpu_utilization_ratio{gpu="GPU-narrow",index="0"} 0.93' in metrics
    finally:
        agent.process.kill()
        agent.process.wait()


def test_without_nvml_an_agent_says_so_once_and_works(tmp_path: Path) -> None:
    agent = Agent(tmp_path, None)
    try:
        assert agent.report() == {"gpus": 0, "findings": []}
        assert "grpo_gpu_" not in (agent.get("/metrics") or "")
        assert agent.log.read_text().count("the health of GPUs is not read") == 1
    finally:
        agent.process.kill()
        agent.process.wait()
