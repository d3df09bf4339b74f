"""Metrics of a step: derived figures, records, dashboards, thresholds."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.observability import MlflowSpec, ObservabilitySpec, ThresholdSpec, WandbSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.flops import ModelFlops, attention_width, utilisation
from grpo_worker.metrics.run_config import flattened, run_config
from grpo_worker.metrics.sink_thread import SinkThread
from grpo_worker.metrics.sinks import Mlflow, Sink, sinks_of
from grpo_worker.metrics.writer import MetricsWriter
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


class Broken:
    def begin(self, after: int) -> None: ...

    def write(self, step: int, metrics: dict[str, float]) -> None:
        raise ConnectionError("the service is away")

    def end(self) -> None: ...


def test_a_failing_sink_is_disabled_and_the_others_continue(tmp_path: Path) -> None:
    sinks: list[Sink] = [Broken(), *sinks_of(ObservabilitySpec(), "job", tmp_path, {})]
    bound = ThresholdSpec(metric="actor/kl_loss", maximum=0.1)
    writer = MetricsWriter(JobFolder(tmp_path, tmp_path), sinks, [bound])
    writer.truncate(0)
    for step in (1, 2):
        writer.write(step, {"actor/kl_loss": 0.5})
    writer.flush()
    writer.end()
    lines = [json.loads(line) for line in writer.file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert list((tmp_path / "tensorboard").iterdir())
    name = {"name": "actor/kl_loss"}
    assert REGISTRY.get_sample_value("grpo_metric", name) == 0.5
    assert REGISTRY.get_sample_value("grpo_metric_maximum", name) == 0.1


class Slow:
    """A service that takes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.calls: list[object] = []

    def begin(self, after: int) -> None:
        self.calls.append(("begin", after))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.released.wait(30)
        self.calls.append(step)

    def end(self) -> None:
        self.calls.append("end")


def test_a_slow_sink_stalls_no_step_and_gets_all_of_them(tmp_path: Path) -> None:
    slow = Slow()
    writer = MetricsWriter(
        JobFolder(tmp_path, tmp_path), [slow, *sinks_of(ObservabilitySpec(), "job", tmp_path, {})], []
    )
    writer.truncate(0)
    for step in (1, 2, 3):
        writer.write(step, {"loss": 0.5})  # would wait for 30 s each
    writer.flush()
    assert len(writer.file.read_text().splitlines()) == 3 and slow.calls in ([], [("begin", 0)])
    slow.released.set()
    writer.end()
    assert slow.calls == [("begin", 0), 1, 2, 3, "end"]


def test_a_sink_that_is_far_behind_loses_the_oldest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_worker.metrics.sink_thread._WAITING", 2)
    slow = Slow()
    thread = SinkThread(slow)
    for step in range(1, 7):
        thread.call(lambda sink, step=step: sink.write(step, {}))  # type: ignore[misc]
        while step == 1 and thread._calls:  # until the thread is inside the first call
            time.sleep(0.01)
    slow.released.set()
    thread.end()
    assert thread.dropped == 3 and slow.calls == [1, 5, 6]


def test_mlflow_keeps_one_run_across_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server's client is the same
    spec = MlflowSpec(tracking_uri=f"file://{tmp_path}/mlruns")
    config = {"trainer": {"optimizer": {"lr": 1e-6}}} | {f"field{i}": i for i in range(150)}
    first = Mlflow(spec, "job", tmp_path, config)
    first.write(1, {"actor/loss": 0.5})
    second = Mlflow(spec, "job", tmp_path, config | {"totalSteps": 9})
    second.write(2, {"actor/loss": 0.25})
    second.end()
    history = second._client.get_metric_history(second._run, "actor/loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25)]
    run = second._client.get_run(second._run)
    assert run.info.status == "FINISHED"
    assert len(run.data.params) == 151 and run.data.params["trainer.optimizer.lr"] == "1e-06"


def test_wandb_writes_a_run_without_a_network(tmp_path: Path) -> None:
    # A process of its own: W&B starts a service and hooks into the interpreter's end.
    code = (
        "from pathlib import Path\n"
        "from grpo_operator.api.v1alpha1.observability import ObservabilitySpec, WandbSpec\n"
        "from grpo_worker.metrics.sinks import sinks_of\n"
        "spec = ObservabilitySpec(tensorboard=False, wandb=WandbSpec(project='p', offline=True))\n"
        f"(sink,) = sinks_of(spec, 'job', Path({str(tmp_path)!r}), {{'trainer': {{'lr': 0.0625}}}})\n"
        "sink.begin(0); sink.write(3, {'loss': 0.5}); sink.begin(1); sink.write(2, {'loss': 1.0})\n"
        "sink.end()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = run.glob("*.wandb")
    assert b"0.0625" in record.read_bytes(), "the configuration"


def test_the_configuration_of_a_run_has_defaults_and_no_templates_of_pods() -> None:
    manifest = job()
    manifest["spec"]["trainer"]["podTemplate"] = {"spec": {"nodeSelector": {"key": "secret"}}}
    spec = spec_of(manifest)
    config = flattened(run_config(spec))
    assert config["trainer.optimizer.lr"] == str(spec.trainer.optimizer.lr)
    assert config["algorithm.samplesPerPrompt"] == str(spec.algorithm.samples_per_prompt)
    assert "secret" not in str(config)


def test_a_threshold_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="set minimum or maximum"):
        ThresholdSpec(metric="x")
    assert WandbSpec(project="p").offline is False
