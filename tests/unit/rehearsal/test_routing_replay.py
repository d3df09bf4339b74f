"""Routing replay in a rehearsal: experts go from engines to ranks, references through the controller."""

from pathlib import Path

import pytest

from grpo_rehearsal.job import read_job
from grpo_rehearsal.report.summary import summary
from grpo_rehearsal.run import rehearse
from grpo_rehearsal.scenario import Scenario
from grpo_rehearsal.standins.object_store import experts_in
from grpo_worker.common.ragged_batch import RaggedBatch

SMALL = (
    ("architecture: qwen3-8b", "architecture: qwen3-30b-a3b"),
    ("parallelism: {tensor: 2}", "parallelism: {tensor: 2, pipeline: 2, expert: 8}"),
    ("  totalSteps: 3", "  weightSync: {transport: staged}\n  totalSteps: 3"),
    ("    nodes: 1\n", "    nodes: 4\n"),
)
LAYERS, TOPK = 48, 8  # Qwen3-30B-A3B


@pytest.mark.parametrize("lag", [0, 1])
def test_experts_go_from_engines_to_ranks_only(small_manifest: Path, tmp_path: Path, lag: int) -> None:
    text = small_manifest.read_text()
    for old, new in SMALL:
        assert old in text
        text = text.replace(old, new)
    small_manifest.write_text(text + f"  staleness: {{maxVersionLag: {lag}}}\n")
    job = read_job(small_manifest, routing_replay=True)
    outcome = rehearse(job, Scenario(steps=2), tmp_path / "run")
    figures = summary(outcome)
    assert figures["phase"] == "Succeeded", figures["message"]
    tokens = sum(len_ for e in outcome.cluster.engines for _, len_ in e.record.ends)
    kept, prompts = figures["routed_experts_kept_bytes"], 2 * 64 * 512
    assert LAYERS * TOPK * tokens < kept < LAYERS * (TOPK * (tokens + prompts) + 4 * 2 * 64)
    crcs = 4 * LAYERS * 2 * 64
    assert figures["links"]["engine>trainer"] == kept - crcs, "every layer of every sample, once"
    assert figures["routed_experts_bytes"] == 0 < figures["routed_experts_reference_bytes"] < kept / 100
    assert sum(agent.dropped for agent in outcome.cluster.agents) == 2 * 64


def test_experts_in_an_argument_would_be_counted() -> None:
    import numpy as np

    lengths = np.array([3], np.int32)
    experts = np.zeros((2, 2, 4), np.uint8)
    batch = RaggedBatch(np.array([1], np.int32), lengths, 3, np.zeros(3, np.int32), routed=[experts])
    assert experts_in([batch, {"other": np.zeros((4, 4))}]) == experts.nbytes
