"""Metrics of a step: derived figures, the configuration of a run, thresholds."""

from importlib.metadata import version

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.observability import ThresholdSpec, WandbSpec
from grpo_worker.metrics.flops import ModelFlops, attention_width, utilisation
from grpo_worker.metrics.run_config import flattened, run_config
from support.objects import job, spec_of


def test_forward_flops_are_two_per_parameter_plus_causal_attention() -> None:
    flops = ModelFlops(parameters=1000, attention=16)
    assert flops.forward([10]) == 2 * 1000 * 10 + 16 * 100
    assert flops.forward([10, 10]) == 2 * flops.forward([10])


def test_the_attention_width_of_deepseek_v3() -> None:
    assert attention_width(architecture("deepseek-v3")) == 61 * 128 * (128 + 64 + 128)


def test_mfu_is_the_share_of_peak_flops_in_update_and_log_probs() -> None:
    seconds = {"timing_s/update_actor": 3.0, "timing_s/old_log_prob": 2.0}
    found = utilisation(ModelFlops(10**9, 0), [500, 500], seconds, gpus=2, peak=1e12)
    assert found["perf/mfu/actor"] == pytest.approx(2e12 * 3 / 3 / 2 / 1e12)
    assert found["perf/mfu/actor_infer"] == pytest.approx(2e12 / 2 / 2 / 1e12)
    assert "perf/mfu/actor" not in utilisation(ModelFlops(1, 0), [1], seconds, 2, None)


def test_the_configuration_of_a_run_has_defaults_and_no_templates_of_pods() -> None:
    manifest = job()
    manifest["spec"]["trainer"]["podTemplate"] = {"spec": {"nodeSelector": {"key": "secret"}}}
    spec = spec_of(manifest)
    config = flattened(run_config(spec, rollout_gpus=8))
    assert config["trainer.optimizer.lr"] == str(spec.trainer.optimizer.lr)
    assert config["algorithm.samplesPerPrompt"] == str(spec.algorithm.samples_per_prompt)
    assert "secret" not in str(config)
    assert config["layout.trainerGpus"] == str(spec.trainer.world) and config["layout.rolloutGpus"] == "8"
    assert config["versions.torch"] == version("torch")


def test_a_threshold_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="set minimum or maximum"):
        ThresholdSpec(metric="x")
    assert WandbSpec(project="p").offline is False
