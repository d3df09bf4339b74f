"""Prometheus metrics of the GPUs, from the newest readings."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_operator.api.gpu_messages import Severity
from grpo_worker.gpu_health.monitor import GpuMonitor
from grpo_worker.gpu_health.reading import GpuReading, NvLink

_GPU = ["gpu", "index"]
_LINK = ["gpu", "index", "link"]
_SEVERITIES = tuple(Severity)


class GpuCollector(Collector):
    """Collector that reads the monitor at each scrape. Values that a GPU does not support are left out."""

    def __init__(self, monitor: GpuMonitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all GPUs."""
        readings = self._monitor.readings
        yield self._health(readings)
        yield self._xids(readings)
        yield from _values(readings)
        yield from _links(readings)

    def _health(self, readings: Iterable[GpuReading]) -> Metric:
        family = GaugeMetricFamily("grpo_gpu_health", "0: healthy, 1: degraded, 2: sick", labels=_GPU)
        severities = self._monitor.severities()
        for gpu in readings:
            family.add_metric(_labels(gpu), _SEVERITIES.index(severities.get(gpu.uuid, Severity.OK)))
        return family

    def _xids(self, readings: Iterable[GpuReading]) -> Metric:
        family = CounterMetricFamily(
            "grpo_gpu_xid_errors", "XIDs since the agent started", labels=["gpu", "index", "xid"]
        )
        indexes = {gpu.uuid: gpu.index for gpu in readings}
        for (uuid, code), count in self._monitor.xid_counts.items():
            if uuid in indexes:
                family.add_metric([uuid, str(indexes[uuid]), str(code)], count)
        return family


def _values(readings: list[GpuReading]) -> Iterator[Metric]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "ecc_volatile": CounterMetricFamily(
            "grpo_gpu_ecc_uncorrected_volatile",
            "Uncorrectable ECC errors since the driver was loaded",
            labels=_GPU,
        ),
        "ecc_aggregate": CounterMetricFamily(
            "grpo_gpu_ecc_uncorrected_aggregate", "Uncorrectable ECC errors in the GPU's life", labels=_GPU
        ),
        "sram_threshold_exceeded": GaugeMetricFamily(
            "grpo_gpu_sram_threshold_exceeded", "1: SRAM errors are over NVIDIA's threshold", labels=_GPU
        ),
        "retired_pages_pending": GaugeMetricFamily(
            "grpo_gpu_retired_pages_pending", "1: pages are retired at the next reset", labels=_GPU
        ),
        "remapped_rows": GaugeMetricFamily("grpo_gpu_remapped_rows", "Remapped rows of memory", labels=_GPU),
        "remap_pending": GaugeMetricFamily(
            "grpo_gpu_remap_pending", "1: rows are remapped at the next reset", labels=_GPU
        ),
        "remap_failed": GaugeMetricFamily("grpo_gpu_remap_failed", "1: a row was not remapped", labels=_GPU),
        "sm_clock": GaugeMetricFamily("grpo_gpu_sm_clock_megahertz", "Clock of the SMs", labels=_GPU),
        "memory_clock": GaugeMetricFamily(
            "grpo_gpu_memory_clock_megahertz", "Clock of the memory", labels=_GPU
        ),
        "event_reasons": GaugeMetricFamily(
            "grpo_gpu_clocks_event_reasons", "NVML's bits of why clocks are lowered", labels=_GPU
        ),
        "temperature": GaugeMetricFamily("grpo_gpu_temperature_celsius", "Temperature", labels=_GPU),
        "slowdown_temperature": GaugeMetricFamily(
            "grpo_gpu_slowdown_temperature_celsius", "Temperature from which the GPU slows down", labels=_GPU
        ),
        "power": GaugeMetricFamily("grpo_gpu_power_watts", "Power drawn", labels=_GPU),
        "memory_used": GaugeMetricFamily("grpo_gpu_memory_used_bytes", "Memory in use", labels=_GPU),
        "memory_total": GaugeMetricFamily("grpo_gpu_memory_total_bytes", "Memory of the GPU", labels=_GPU),
        "utilization": GaugeMetricFamily(
            "grpo_gpu_utilization_ratio", "Share of the time in which a kernel ran", labels=_GPU
        ),
        "pcie_generation": GaugeMetricFamily(
            "grpo_gpu_pcie_generation", "PCIe generation in use; lower while idle", labels=_GPU
        ),
        "pcie_generation_max": GaugeMetricFamily(
            "grpo_gpu_pcie_generation_max", "Highest PCIe generation of GPU and system", labels=_GPU
        ),
        "pcie_width": GaugeMetricFamily("grpo_gpu_pcie_width", "PCIe lanes in use", labels=_GPU),
        "pcie_width_max": GaugeMetricFamily(
            "grpo_gpu_pcie_width_max", "PCIe lanes of GPU and system", labels=_GPU
        ),
    }
    for gpu in readings:
        _add(families, gpu, _labels(gpu))
    yield from families.values()


def _links(readings: list[GpuReading]) -> Iterator[Metric]:
    active = GaugeMetricFamily("grpo_gpu_nvlink_active", "1: the NVLink is up", labels=_LINK)
    counters = {
        "replays": CounterMetricFamily("grpo_gpu_nvlink_replays", "Replays of an NVLink", labels=_LINK),
        "recoveries": CounterMetricFamily(
            "grpo_gpu_nvlink_recoveries", "Recoveries of an NVLink", labels=_LINK
        ),
        "crc_errors": CounterMetricFamily(
            "grpo_gpu_nvlink_crc_errors", "CRC errors of an NVLink", labels=_LINK
        ),
    }
    for gpu in readings:
        for link in gpu.links:
            labels = [*_labels(gpu), str(link.link)]
            active.add_metric(labels, float(link.active))
            _add(counters, link, labels)
    yield from (active, *counters.values())


def _add(
    families: Mapping[str, CounterMetricFamily | GaugeMetricFamily],
    of: GpuReading | NvLink,
    labels: list[str],
) -> None:
    """Add the values of the fields by which ``families`` are named, where the GPU supports them."""
    for field, family in families.items():
        value = getattr(of, field)
        if value is not None:
            family.add_metric(labels, float(value))


def _labels(gpu: GpuReading) -> list[str]:
    return [gpu.uuid, str(gpu.index)]
