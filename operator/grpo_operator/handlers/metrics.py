"""Prometheus metrics of the operator: its reconciles, and the status of every job in the cache."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_operator.observe.cache import Cache

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)
RECONCILE_SECONDS = Histogram(
    "grpo_reconcile_seconds", "Duration of one reconcile", ["kind"], buckets=_BUCKETS
)
RECONCILES = Counter("grpo_reconciles_total", "Reconciles by kind and result", ["kind", "result"])

_JOB = ["namespace", "name"]


class JobCollector(Collector):
    """Collector that reads the cache at each scrape, so that series of deleted jobs disappear."""

    def __init__(self, cache: Cache, leads: Callable[[], bool]) -> None:
        self._cache, self._leads = cache, leads

    def collect(self) -> Iterator[Metric]:
        """Yield one sample per job and metric; values that are not known yet are left out.

        Only the leader among the operator's replicas has samples, so that each job is counted once.
        """
        info = GaugeMetricFamily("grpo_job_info", "Jobs by phase", labels=[*_JOB, "phase"])
        restarts = CounterMetricFamily(
            "grpo_job_restarts", "Restarts by cause: job or infrastructure", labels=[*_JOB, "cause"]
        )
        gauges = {
            "step": GaugeMetricFamily("grpo_job_step", "Finished steps", labels=_JOB),
            "totalSteps": GaugeMetricFamily("grpo_job_total_steps", "Total steps of the job", labels=_JOB),
            "weightVersion": GaugeMetricFamily(
                "grpo_job_weight_version", "Weight version that the engines serve", labels=_JOB
            ),
            "rewardMean": GaugeMetricFamily(
                "grpo_job_reward_mean", "Mean reward of the last step", labels=_JOB
            ),
            "timesParked": GaugeMetricFamily(
                "grpo_job_times_parked",
                "Times that the trainers waited, alive, for engines, the reward or room in the store",
                labels=_JOB,
            ),
            "tokensPerSecondPerGpu": GaugeMetricFamily(
                "grpo_job_tokens_per_second_per_gpu", "Throughput of the last step", labels=_JOB
            ),
        }
        saved = GaugeMetricFamily(
            "grpo_job_checkpoint_step", "Step of the newest complete checkpoint; 0: none", labels=_JOB
        )
        interval = GaugeMetricFamily(
            "grpo_job_checkpoint_interval_steps", "Steps between two checkpoints", labels=_JOB
        )
        spares = GaugeMetricFamily("grpo_job_spare_pods", "Ready spare training pods", labels=_JOB)
        slow = GaugeMetricFamily("grpo_job_stragglers", "Trainer ranks that are stragglers", labels=_JOB)
        lag = GaugeMetricFamily(
            "grpo_job_weight_version_lag", "Versions that the slowest engine is behind", labels=_JOB
        )
        uses = CounterMetricFamily(
            "grpo_job_gpu_seconds", "GPU seconds of the run by use; see status.goodput", labels=[*_JOB, "use"]
        )
        losses = CounterMetricFamily(
            "grpo_job_lost_gpu_seconds", "Idle and replayed GPU seconds by cause", labels=[*_JOB, "cause"]
        )
        for (namespace, name), job in list(self._cache.jobs.items()) if self._leads() else ():
            status, key = job.get("status") or {}, [namespace, name]
            info.add_metric([*key, status.get("phase", "Pending")], 1)
            for field, family in gauges.items():
                if field in status:
                    family.add_metric(key, float(status[field]))
            for cause, count in (status.get("restarts") or {}).items():
                restarts.add_metric([*key, cause], count)
            goodput = status.get("goodput") or {}
            for use, spent in (goodput.get("gpuSeconds") or {}).items():
                uses.add_metric([*key, use], spent)
            for cause, spent in (goodput.get("lostGpuSeconds") or {}).items():
                losses.add_metric([*key, cause], spent)
            if every := ((job.get("spec") or {}).get("checkpoint") or {}).get("everySteps"):
                saved.add_metric(key, float((status.get("lastCheckpoint") or {}).get("step") or 0))
                interval.add_metric(key, float(every))
            if status.get("spares"):
                spares.add_metric(key, float(status["spares"].get("ready") or 0))
            slow.add_metric(key, float(len(status.get("stragglers") or [])))
            behind = self._lag(namespace, name, status)
            if behind is not None:
                lag.add_metric(key, behind)
        yield from (info, restarts, uses, losses, saved, interval, spares, slow, lag, *gauges.values())

    def _lag(self, namespace: str, name: str, status: dict[str, Any]) -> int | None:
        pool = self._cache.pools.get((namespace, f"{name}-rollout")) or {}
        versions = [e.get("weightVersion") for e in (pool.get("status") or {}).get("engines") or []]
        known = [version for version in versions if version is not None]
        current = status.get("weightVersion")
        return None if current is None or not known else max(current - min(known), 0)
