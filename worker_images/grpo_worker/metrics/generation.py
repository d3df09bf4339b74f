"""Metrics of generation: live for Prometheus, and differences for each step's record."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class Counts:
    """Numbers since the start.

    ``tokens``: received from engines. ``retries``: requests that ended early. ``continued``: samples that
    went on from the tokens that they had. ``refused``: prompts that engines refused or failed at.
    """

    tokens: int = 0
    retries: int = 0
    continued: int = 0
    refused: int = 0


class Generating(Protocol):
    """The part of RolloutClient that is measured."""

    @property
    def counts(self) -> Counts:
        """Numbers since the start."""

    @property
    def in_flight(self) -> int:
        """Number of requests on engines."""

    @property
    def queued(self) -> int:
        """Number of samples that wait for room on an engine."""


class GenerationCollector(Collector):
    """Prometheus metrics of a client, read when they are scraped."""

    def __init__(self, client: Generating) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """Return the current values."""
        client, counts = self._client, self._client.counts
        yield GaugeMetricFamily("grpo_rollout_in_flight", "Requests on engines", client.in_flight)
        yield GaugeMetricFamily("grpo_rollout_queued", "Samples waiting for room on an engine", client.queued)
        yield CounterMetricFamily("grpo_rollout_tokens", "Tokens received from engines", counts.tokens)
        yield CounterMetricFamily("grpo_rollout_retries", "Requests that ended early", counts.retries)
        yield CounterMetricFamily(
            "grpo_rollout_continued", "Samples continued on another engine", counts.continued
        )
        yield CounterMetricFamily(
            "grpo_rollout_refused", "Prompts that engines refused or failed at", counts.refused
        )


def export(client: Generating) -> None:
    """Add a client's metrics to this process's registry."""
    REGISTRY.register(GenerationCollector(client))


class GenerationMetrics:
    """Differences of a client's numbers from step to step."""

    def __init__(self, client: Generating) -> None:
        self._client = client
        self._before = replace(client.counts)

    def step(self, seconds: float) -> dict[str, float]:
        """Return the numbers since the last call. ``seconds``: duration of the step."""
        now, before = replace(self._client.counts), self._before
        self._before = now
        return {
            "rollout/tokens_per_second": (now.tokens - before.tokens) / seconds,
            "rollout/retries": float(now.retries - before.retries),
            "rollout/continued_samples": float(now.continued - before.continued),
        }


def refused_message(refused: Mapping[int, str]) -> str:
    """Return the status message of a step whose prompts were refused; "" if none was."""
    if not refused:
        return ""
    index, reason = next(iter(refused.items()))
    return f"{len(refused)} prompts were refused and dropped, the first is {index}: {reason}"[:500]
