"""Prometheus metrics and log lines of weight updates."""

import logging

from prometheus_client import Counter, Gauge

from grpo_worker.weightsync.agent.update import Phase, Update

log = logging.getLogger(__name__)
_PHASES = Counter("grpo_weight_update_phases_total", "Phases that weight updates entered", ["phase"])
_SECONDS = Counter("grpo_weight_update_seconds_total", "Seconds in each part of weight updates", ["part"])
_BYTES = Counter("grpo_weight_update_bytes_total", "Bytes of the updates that were committed")
_RECEIVED = Counter("grpo_weight_received_bytes_total", "Bytes fetched from other agents")
_VERSION = Gauge("grpo_weight_version", "Version that the engine serves; -1: none")
_NIXL_READS = Counter("grpo_weight_nixl_reads_total", "Versions read over NIXL, or not", ["outcome"])
for _phase in Phase:
    _PHASES.labels(_phase)  # start at zero, so that rate() sees the first increment
for _outcome in ("success", "fallback"):
    _NIXL_READS.labels(_outcome)


def record_phase(update: Update) -> None:
    """Count and log that an update entered its phase."""
    _PHASES.labels(update.phase).inc()
    level = logging.WARNING if update.phase == Phase.ABORTED else logging.INFO
    log.log(level, "update to version %d: %s %s", update.version, update.phase, update.reason)


def record_commit(seconds: dict[str, float], nbytes: int) -> None:
    """Count the seconds of each part and the bytes of a committed update."""
    for part, value in seconds.items():
        _SECONDS.labels(part).inc(value)
    _BYTES.inc(nbytes)


def record_fetch(nbytes: int) -> None:
    """Count the bytes that a fetched version took over the network."""
    _RECEIVED.inc(nbytes)


def record_nixl_read(succeeded: bool) -> None:
    """Count a version whose blobs were read over NIXL, or fetched over HTTP after NIXL failed."""
    _NIXL_READS.labels("success" if succeeded else "fallback").inc()


def set_version(version: int | None) -> None:
    """Set the version that the engine serves."""
    _VERSION.set(-1 if version is None else version)
