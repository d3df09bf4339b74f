"""Verdicts on readings of GPUs and on XIDs, and since when a finding holds."""

from typing import Any

import pytest

from grpo_operator.api.gpu_messages import MAX_FINDINGS, Severity
from grpo_worker.gpu_health.monitor import XID_SECONDS, GpuMonitor
from grpo_worker.gpu_health.reading import GpuReading, NvLink
from grpo_worker.gpu_health.verdict import problems
from grpo_worker.gpu_health.xids import meaning
from support.clocks import FakeClock


def gpu(**fields: Any) -> GpuReading:
    values: dict[str, Any] = {"index": 0, "uuid": "GPU-a"} | fields
    return GpuReading(**values)


@pytest.mark.parametrize(
    ("fields", "severity", "reason"),
    [
        ({"failure": "GpuLost"}, Severity.SICK, "GpuLost"),
        ({"failure": "ResetRequired"}, Severity.SICK, "ResetRequired"),
        ({"remap_failed": True}, Severity.SICK, "RemapFailed"),
        ({"sram_threshold_exceeded": True}, Severity.SICK, "SramThresholdExceeded"),
        ({"remap_pending": True}, Severity.DEGRADED, "RemapPending"),
        ({"retired_pages_pending": True}, Severity.DEGRADED, "RemapPending"),
        ({"ecc_volatile": 1}, Severity.DEGRADED, "EccUncorrectable"),
        ({"event_reasons": 0x48}, Severity.DEGRADED, "HwThermalSlowdown"),
        ({"event_reasons": 0x88}, Severity.DEGRADED, "HwPowerBrake"),
        ({"event_reasons": 0x08}, Severity.DEGRADED, "HwSlowdown"),
        ({"temperature": 90, "slowdown_temperature": 90}, Severity.DEGRADED, "TooHot"),
        ({"pcie_width": 8, "pcie_width_max": 16}, Severity.DEGRADED, "PcieNarrow"),
    ],
)
def test_each_sign_has_one_verdict(fields: dict[str, Any], severity: Severity, reason: str) -> None:
    (problem,) = problems(gpu(**fields))
    assert (problem.severity, problem.reason) == (severity, reason)


@pytest.mark.parametrize(
    "fields",
    [
        {},  # a GPU that supports nothing is healthy as far as anybody knows
        {"event_reasons": 0x4},  # software power cap
        {"event_reasons": 0x1},  # idle
        {"temperature": 89, "slowdown_temperature": 90},
        {"temperature": 120},
        {"pcie_width": 16, "pcie_width_max": 16, "pcie_generation": 1, "pcie_generation_max": 5},
        {"ecc_aggregate": 12, "ecc_volatile": 0, "remapped_rows": 3},
    ],
)
def test_a_healthy_gpu_has_no_problem(fields: dict[str, Any]) -> None:
    assert list(problems(gpu(**fields))) == []


def test_a_link_is_down_only_if_it_was_up() -> None:
    reading = gpu(links=(NvLink(0, True), NvLink(1, False), NvLink(2, False)))
    assert list(problems(reading)) == []
    (problem,) = problems(reading, frozenset({0, 2}))
    assert problem.severity is Severity.SICK and problem.text == "NVLinks 2 went down"


def test_xids_are_classed_as_in_nvidias_catalog() -> None:
    by_severity = {
        Severity.SICK: (46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 158),
        Severity.DEGRADED: (63, 92, 94, 144, 150, 154, 9999),
        Severity.OK: (11, 13, 31, 43, 45, 137),
    }
    for severity, codes in by_severity.items():
        assert {meaning(code).severity for code in codes} == {severity}


def _monitor() -> tuple[GpuMonitor, FakeClock]:
    clock = FakeClock()
    return GpuMonitor(clock.now), clock


def test_a_finding_keeps_the_time_at_which_it_began() -> None:
    monitor, clock = _monitor()
    for _ in range(3):
        monitor.take([gpu(remap_failed=True)])
        clock.sleep(10)
    (finding,) = monitor.report().findings
    assert finding.since == 1000 and finding.reason == "RemapFailed"
    monitor.take([gpu()])
    assert monitor.report().findings == () and monitor.report().gpus == 1
    monitor.take([gpu(remap_failed=True)])
    assert monitor.report().findings[0].since == 1030


def test_a_fatal_xid_stays_and_a_survived_one_is_forgotten_after_an_hour() -> None:
    monitor, clock = _monitor()
    monitor.take([gpu()])
    for code in (94, 79, 31, 31):
        monitor.take_xid("GPU-a", code)
    assert [f.reason for f in monitor.report().findings] == ["Xid79", "Xid94"], "worst first"
    assert monitor.severities() == {"GPU-a": Severity.SICK}
    clock.sleep(XID_SECONDS)
    monitor.take([gpu()])
    (finding,) = monitor.report().findings
    assert finding.reason == "Xid79" and finding.since == 1000
    assert finding.text == "XID 79: the GPU has fallen off the bus"
    assert monitor.xid_counts == {("GPU-a", 94): 1, ("GPU-a", 79): 1, ("GPU-a", 31): 2}


def test_a_report_is_bounded_and_keeps_the_worst() -> None:
    monitor, _ = _monitor()
    many = [gpu(index=i, uuid=f"GPU-{i}", ecc_volatile=1, remap_pending=True) for i in range(MAX_FINDINGS)]
    monitor.take([*many, gpu(index=64, failure="GpuLost")])
    findings = monitor.report().findings
    assert len(findings) == MAX_FINDINGS and findings[0].reason == "GpuLost"
