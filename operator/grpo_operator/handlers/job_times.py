"""Prometheus metrics of what alerts compare: how long jobs make no progress, and what a loss would repeat."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_operator.api.names import rollout_pool
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.status.phase_times import AT_WORK, age, phase_limit, phase_of

_JOB = ["namespace", "name"]


class JobTimesCollector(Collector):
    """Collector that reads the cache at each scrape, as JobCollector does.

    ``least``: limits of phases, see ``phase_limit``. ``wall``: seconds since 1970.
    """

    def __init__(
        self, cache: Cache, leads: Callable[[], bool], least: Mapping[str, float],
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._cache, self._leads, self._least, self._wall = cache, leads, least, wall

    def collect(self) -> Iterator[Metric]:
        """Yield at most one sample per job and metric; only the leader among the replicas has samples."""
        lasts = GaugeMetricFamily(
            "grpo_job_phase_seconds",
            "Seconds without progress: since the job entered its phase or finished a step in it; phase "
            "Parked: since the trainers are parked",
            labels=[*_JOB, "phase"],
        )
        limits = GaugeMetricFamily(
            "grpo_job_phase_limit_seconds",
            "Seconds after which this is too long: metrics.phaseSeconds of the chart, more for jobs with "
            "longer deadlines or steps",
            labels=[*_JOB, "phase"],
        )
        steps = GaugeMetricFamily("grpo_job_step_seconds", "Duration of the last step", labels=_JOB)
        saved = GaugeMetricFamily(
            "grpo_job_checkpoint_age_seconds",
            "Seconds since the newest checkpoint was complete, or since the job has pods again if that is "
            "later; jobs with pods only",
            labels=_JOB,
        )
        copied = GaugeMetricFamily(
            "grpo_job_memory_copy_step", "Step of the newest complete copy in the pods' memory", labels=_JOB
        )
        failures = GaugeMetricFamily(
            "grpo_job_memory_copy_failures",
            "Failures since the last copy that was complete in all of its pods; see status.memoryCopies",
            labels=_JOB,
        )
        now = self._wall()
        for key, job in list(self._cache.jobs.items()) if self._leads() else ():
            status = job.get("status") or {}
            phase, since = phase_of(status)
            if phase not in self._least:
                continue
            if since is not None:
                lasts.add_metric([*key, phase], age(since, now))
            limit = phase_limit(phase, job, self._pool(key, job), self._least)
            if limit is not None:
                limits.add_metric([*key, phase], limit)
            if phase not in AT_WORK:
                continue
            if "stepSeconds" in status:
                steps.add_metric(key, float(status["stepSeconds"]))
            if since_saved := _saved(status):
                saved.add_metric(key, age(since_saved, now))
            copies = status.get("memoryCopies") or {}
            if "step" in copies:
                copied.add_metric(key, float(copies["step"]))
            if copies:
                failures.add_metric(key, float(copies.get("failures") or 0))
        yield from (lasts, limits, steps, saved, copied, failures)

    def _pool(self, key: tuple[str, str], job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec of the job's rollout pool, its own or the shared one; {} if there is none."""
        namespace, name = key
        shared = ((job.get("spec") or {}).get("rollout") or {}).get("poolRef") or {}
        pool = self._cache.pools.get((namespace, shared.get("name") or rollout_pool(name))) or {}
        return dict(pool.get("spec") or {})


def _saved(status: Mapping[str, Any]) -> str | None:
    """Return the time of the newest checkpoint, or since when the job has pods if that is later."""
    completed = (status.get("lastCheckpoint") or {}).get("completedAt")
    began = [c["lastTransitionTime"] for c in status.get("conditions") or [] if c["type"] == "Progressing"]
    return max([completed, *began]) if completed else None
