"""Reads the node's GPUs through NVML (the package nvidia-ml-py)."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from grpo_worker.gpu_health.reading import GpuReading, NvLink

_FAILURES = {pynvml.NVML_ERROR_GPU_IS_LOST: "GpuLost", pynvml.NVML_ERROR_RESET_REQUIRED: "ResetRequired"}


class _FailureError(Exception):
    """The GPU answers nothing any more; the argument is the reason."""


class Nvml:
    """All GPUs that the process sees. Raises pynvml.NVMLError without the library, the driver or access."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._uuids: dict[int, str] = {}  # by index: a lost GPU does not tell it any more
        self._handles: dict[int, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                self._handles[index] = handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._uuids[index] = str(pynvml.nvmlDeviceGetUUID(handle))
            except pynvml.NVMLError as error:
                if error.value not in _FAILURES:
                    raise
                self._uuids[index] = f"index-{index}"

    def read(self) -> list[GpuReading]:
        """Return a reading of every GPU."""
        return [self._read(index, uuid) for index, uuid in self._uuids.items()]

    def _read(self, index: int, uuid: str) -> GpuReading:
        try:
            handle = self._handles.get(index) or _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            return GpuReading(index=index, uuid=uuid, links=tuple(_links(handle)), **_fields(handle))
        except _FailureError as error:
            return GpuReading(index=index, uuid=uuid, failure=str(error))

    def watch_xids(self, seen: Callable[[str, int], None], ended: Callable[[], bool]) -> None:
        """Call ``seen`` with UUID and code of each XID until ``ended``, which is asked each second.

        Returns at once when no GPU supports the events.
        """
        events, uuids = pynvml.nvmlEventSetCreate(), {}
        for index, handle in self._handles.items():
            types = _ignored(pynvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
            if types & pynvml.nvmlEventTypeXidCriticalError:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                uuids[_address(handle)] = self._uuids[index]
        while uuids and not ended():
            event = _ignored(pynvml.nvmlEventSetWait_v2, events, 1000)
            uuid = event and uuids.get(_address(event.device))
            if uuid and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                seen(uuid, int(event.eventData))
        pynvml.nvmlEventSetFree(events)


def _address(handle: Any) -> int | None:
    """Return the value of an NVML handle, which is a pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, or None where this GPU or driver has none. Raises _FailureError."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _FAILURES:
            raise _FailureError(_FAILURES[error.value]) from error
        return None


def _ignored(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, or None for any error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _fields(gpu: Any) -> dict[str, Any]:
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, gpu)
    milliwatts, memory = _ask(pynvml.nvmlDeviceGetPowerUsage, gpu), _ask(pynvml.nvmlDeviceGetMemoryInfo, gpu)
    used = _ask(pynvml.nvmlDeviceGetUtilizationRates, gpu)
    return {
        "ecc_volatile": _ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, uncorrected, pynvml.NVML_VOLATILE_ECC),
        "ecc_aggregate": _ask(
            pynvml.nvmlDeviceGetTotalEccErrors, gpu, uncorrected, pynvml.NVML_AGGREGATE_ECC
        ),
        "sram_threshold_exceeded": _sram_threshold_exceeded(gpu),
        "retired_pages_pending": _flag(_ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, gpu)),
        "remapped_rows": rows and rows[0] + rows[1],
        "remap_pending": rows and bool(rows[2]),
        "remap_failed": rows and bool(rows[3]),
        "sm_clock": _ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        "memory_clock": _ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        # The driver's older name of nvmlDeviceGetCurrentClocksEventReasons, which newer drivers have too.
        "event_reasons": _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
        "temperature": _ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        "slowdown_temperature": _ask(
            pynvml.nvmlDeviceGetTemperatureThreshold, gpu, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
        "power": None if milliwatts is None else milliwatts / 1000,
        "memory_used": memory and memory.used,
        "memory_total": memory and memory.total,
        "utilization": None if used is None else used.gpu / 100,
        "pcie_generation": _ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
        "pcie_generation_max": _ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
        "pcie_width": _ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        "pcie_width_max": _ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
    }


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _sram_threshold_exceeded(gpu: Any) -> bool | None:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    answered = _ask(pynvml.nvmlDeviceGetSramEccErrorStatus, gpu, ctypes.byref(status))
    return None if answered is None else bool(status.bThresholdExceeded)


def _links(gpu: Any) -> Iterator[NvLink]:
    """Yield the NVLinks; the first one that NVML does not know ends them."""
    counters = (
        pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
        pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    )
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(pynvml.nvmlDeviceGetNvLinkState, gpu, link)
        if state is None:
            return
        counts = (_ask(pynvml.nvmlDeviceGetNvLinkErrorCounter, gpu, link, c) for c in counters)
        yield NvLink(link, bool(state), *counts)
