"""A small job that rehearses in seconds: 8 ranks, 2 engines, 64 samples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_rehearsal.job import RehearsedJob, read_job
from grpo_rehearsal.run import Outcome, rehearse
from grpo_rehearsal.scenario import Scenario

MANIFEST = """
apiVersion: rl.grpo.dev/v1alpha1
kind: GRPOJob
metadata: {name: small}
spec:
  model: {path: /models/Qwen3-8B, architecture: qwen3-8b, volume: {mountPath: /models, path: /mnt/models}}
  data: {train: "reasoning-gym:gcd", promptLength: 512, responseLength: 2048, trainBatchSize: 16}
  algorithm: {samplesPerPrompt: 4, klCtrl: {type: fixed, klCoef: 0.001}}
  trainer:
    nodes: 1
    gpusPerNode: 8
    gpuType: h100-80gb
    parallelism: {tensor: 2}
    miniBatchSize: 8
    recompute: full
    maxTokensPerGpu: 8192
    resources: {cpu: "8", memory: 600Gi}
  rollout:
    template:
      replicas: 2
      minAvailable: 1
      engine:
        tensorParallel: 4
        gpusPerNode: 4
        gpuType: h100-80gb
        contextLength: 4096
        maxRunningRequests: 16
      resources: {cpu: "8", memory: 600Gi}
  checkpoint: {store: {pvc: checkpoints}, everySteps: 20, keep: 3}
  totalSteps: 3
"""
Rehearse = Callable[[Scenario], Outcome]


@pytest.fixture
def small_manifest(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(MANIFEST)
    return file


@pytest.fixture
def small_job(small_manifest: Path) -> RehearsedJob:
    return read_job(small_manifest)


@pytest.fixture
def two_nodes(small_manifest: Path) -> RehearsedJob:
    """The job with a pipeline over two training nodes."""
    text = small_manifest.read_text()
    for old, new in (
        ("nodes: 1", "nodes: 2"), ("{tensor: 2}", "{tensor: 8, pipeline: 2}"),
        ("miniBatchSize: 8", "miniBatchSize: 16"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    small_manifest.write_text(text)
    return read_job(small_manifest)


@pytest.fixture
def rehearsed(small_job: RehearsedJob, tmp_path: Path) -> Rehearse:
    def run(scenario: Scenario) -> Outcome:
        return rehearse(small_job, scenario, tmp_path / scenario.name)

    return run
