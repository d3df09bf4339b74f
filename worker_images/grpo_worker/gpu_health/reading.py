"""One reading of a GPU. None: the GPU or the driver does not support it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink. The counters are of its data link layer."""

    link: int
    active: bool
    replays: int | None = None
    recoveries: int | None = None
    crc_errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU. ``failure``: reason for which nothing can be read of it (``GpuLost``), or "".

    Clocks are in MHz, temperatures in degrees Celsius, power in watts, memory in bytes. ``event_reasons``:
    NVML's bits of why the clocks are lower than they could be.
    """

    index: int
    uuid: str
    failure: str = ""
    ecc_volatile: int | None = None
    ecc_aggregate: int | None = None
    sram_threshold_exceeded: bool | None = None
    retired_pages_pending: bool | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    event_reasons: int | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    power: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: tuple[NvLink, ...] = ()
