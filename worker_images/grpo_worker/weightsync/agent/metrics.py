"""What became of updates: a line in the log and a count for each step that one takes."""

import logging

from prometheus_client import Counter, Gauge

from grpo_worker.weightsync.agent.update import Phase, Update

log = logging.getLogger(__name__)
_PHASES = Counter("grpo_weight_update_phases_total", "Phases that weight updates entered", ["phase"])
_SECONDS = Counter("grpo_weight_update_seconds_total", "Seconds in each part of weight updates", ["part"])
_BYTES = Counter("grpo_weight_update_bytes_total", "Bytes of the updates that were committed")
_RECEIVED = Counter("grpo_weight_received_bytes_total", "Bytes that versions took from the trainers' agents")
_VERSION = Gauge("grpo_weight_version", "Version that the engine serves; -1: none")
_NIXL_READS = Counter("grpo_weight_nixl_reads_total", "Versions read over NIXL, or not", ["outcome"])
for _phase in Phase:
    _PHASES.labels(_phase)  # a rate needs its zero
for _outcome in ("success", "fallback"):
    _NIXL_READS.labels(_outcome)


def entered(update: Update) -> None:
    """The update is in another phase than before."""
    _PHASES.labels(update.phase).inc()
    level = logging.WARNING if update.phase == Phase.ABORTED else logging.INFO
    log.log(level, "update to version %d: %s %s", update.version, update.phase, update.reason)


def took(seconds: dict[str, float], nbytes: int) -> None:
    """An update was committed."""
    for part, value in seconds.items():
        _SECONDS.labels(part).inc(value)
    _BYTES.inc(nbytes)


def received(nbytes: int) -> None:
    """A version was fetched, all of it or what had changed."""
    _RECEIVED.inc(nbytes)


def read_remotely(succeeded: bool) -> None:
    """A version's blobs were read over NIXL, or had to be taken over HTTP."""
    _NIXL_READS.labels("success" if succeeded else "fallback").inc()


def serves(version: int | None) -> None:
    """What the engine serves now."""
    _VERSION.set(-1 if version is None else version)
