"""Metrics of generation: live values for Prometheus, and differences for each step."""

from types import SimpleNamespace
from typing import Any

from prometheus_client.registry import CollectorRegistry

from grpo_worker.metrics.generation import Counts, GenerationCollector, GenerationMetrics, refused_message


def _client() -> Any:
    counts = Counts(tokens=1000, retries=3, continued=2, refused=1)
    return SimpleNamespace(counts=counts, in_flight=40, queued=8)


def test_prometheus_reads_the_values_of_the_moment() -> None:
    client, registry = _client(), CollectorRegistry()
    registry.register(GenerationCollector(client))
    client.in_flight, client.counts.tokens = 48, 1500
    names = ["in_flight", "queued", "tokens_total", "retries_total", "continued_total", "refused_total"]
    assert [registry.get_sample_value(f"grpo_rollout_{name}") for name in names] == [48, 8, 1500, 3, 2, 1]


def test_a_step_has_the_difference_to_the_step_before() -> None:
    client = _client()
    metrics = GenerationMetrics(client)
    client.counts.tokens, client.counts.continued = 1600, 5
    assert metrics.step(2.0) == {
        "rollout/tokens_per_second": 300.0, "rollout/retries": 0.0, "rollout/continued_samples": 3.0,
    }  # fmt: skip
    assert metrics.step(2.0)["rollout/tokens_per_second"] == 0


def test_the_message_names_the_first_refused_prompt() -> None:
    assert refused_message({}) == ""
    text = refused_message({7: "engine-0 refuses to sample: too long", 9: "no"})
    assert text == "2 prompts were refused and dropped, the first is 7: engine-0 refuses to sample: too long"
