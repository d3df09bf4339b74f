"""Judges a reading of a GPU (pure)."""

from collections.abc import Iterator
from typing import NamedTuple

from grpo_operator.api.gpu_messages import Severity
from grpo_worker.gpu_health.reading import GpuReading

# NVML's nvmlClocksEventReasonHw*. A software power cap (0x4) is normal under load.
_HW_SLOWDOWN, _HW_THERMAL, _HW_POWER_BRAKE = 0x8, 0x40, 0x80
_FAILURES = {"GpuLost": "the driver has lost the GPU", "ResetRequired": "the GPU must be reset"}


class Problem(NamedTuple):
    """One thing that is wrong with a GPU. ``reason``: CamelCase."""

    severity: Severity
    reason: str
    text: str


def problems(now: GpuReading, once_active: frozenset[int] = frozenset()) -> Iterator[Problem]:
    """Yield what is wrong. ``once_active``: NVLinks of the GPU that were active in an earlier reading."""
    if now.failure:
        yield Problem(Severity.SICK, now.failure, _FAILURES[now.failure])
        return
    yield from _memory(now)
    yield from _speed(now)
    down = sorted(link.link for link in now.links if not link.active and link.link in once_active)
    if down:
        yield Problem(Severity.SICK, "NvLinkDown", f"NVLinks {', '.join(map(str, down))} went down")


def _memory(now: GpuReading) -> Iterator[Problem]:
    if now.remap_failed:
        yield Problem(Severity.SICK, "RemapFailed", "a row of memory could not be remapped")
    if now.sram_threshold_exceeded:
        text = "uncorrectable errors of the SRAM are over NVIDIA's threshold"
        yield Problem(Severity.SICK, "SramThresholdExceeded", text)
    if now.remap_pending or now.retired_pages_pending:
        yield Problem(Severity.DEGRADED, "RemapPending", "memory is remapped at the next reset")
    if now.ecc_volatile:
        text = f"{now.ecc_volatile} uncorrectable ECC errors since the driver was loaded"
        yield Problem(Severity.DEGRADED, "EccUncorrectable", text)


def _speed(now: GpuReading) -> Iterator[Problem]:
    reasons = now.event_reasons or 0
    if reasons & _HW_THERMAL:
        yield Problem(Severity.DEGRADED, "HwThermalSlowdown", "the GPU is slowed down because it is hot")
    if reasons & _HW_POWER_BRAKE:
        yield Problem(Severity.DEGRADED, "HwPowerBrake", "the power supply slows the GPU down")
    if reasons & _HW_SLOWDOWN and not reasons & (_HW_THERMAL | _HW_POWER_BRAKE):
        yield Problem(Severity.DEGRADED, "HwSlowdown", "the hardware slows the GPU down")
    limit = now.slowdown_temperature
    if now.temperature is not None and limit is not None and now.temperature >= limit:
        text = f"{now.temperature} degrees: it slows down from {limit}"
        yield Problem(Severity.DEGRADED, "TooHot", text)
    width, widest = now.pcie_width, now.pcie_width_max
    if width is not None and widest is not None and width < widest:
        yield Problem(Severity.DEGRADED, "PcieNarrow", f"PCIe runs {width} lanes of {widest}")
