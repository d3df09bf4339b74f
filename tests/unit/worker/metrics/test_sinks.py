"""What TensorBoard, W&B, MLflow and trackio have of a run, read back from what they have written."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.observability import MlflowSpec, ObservabilitySpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.sinks.base import RunArtifacts, SampleTable
from grpo_worker.metrics.sinks.configured import sinks_of
from grpo_worker.metrics.sinks.mlflow import Mlflow
from grpo_worker.metrics.sinks.tensorboard import TensorBoard
from support import wandb_files

CONFIG = {"trainer": {"optimizer": {"lr": 0.0625}}}
COLUMNS = ("step", "prompt", "response", "score", "advantage")
LEFT = RunArtifacts("<p>the page</p>", {"last_checkpoint": "s3://bucket/step-00000004.attempt-2"})


def table(step: int, text: str = "fine", name: str = "samples") -> SampleTable:
    rows = [(step, "1 | 2?\n```", text, 1.0, 0.5), (step, "1 | 2?\n```", "", 0.0, None)]
    return SampleTable(name, step, COLUMNS, rows)


def two_attempts(folder: Path, spec: dict[str, Any]) -> None:
    """Let a sink take a run whose second controller repeats step 2, in a process of its own.

    Clients of services start threads and processes, and hook into the interpreter's end.
    """
    code = f"""
import sys
from pathlib import Path
from grpo_operator.api.v1alpha1.observability import ObservabilitySpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.metrics.sinks.configured import sinks_of
from unit.worker.metrics.test_sinks import CONFIG, LEFT, table

spec = ObservabilitySpec.model_validate({spec!r})
folder = Path({str(folder)!r})
for attempt in (1, 2):
    (opening,) = sinks_of(spec, "a-job", JobFolder(folder, folder), CONFIG)
    sink = opening.open()
    sink.begin(attempt - 1)
    for step in (1, 2) if attempt == 1 else (2, 3):
        sink.write(step, {{"loss": 1 / step + attempt}})
        sink.table(table(step, f"attempt {{attempt}}"))
    if attempt == 2:
        sink.table(table(2, name="validation_samples"))
        sink.artifacts(LEFT)
    sink.end(failed=attempt == 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def texts_of(folder: Path, tag: str) -> list[tuple[int, str]]:
    """Return steps and texts of a tag, as TensorBoard's server reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    events = found.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


def test_tensorboard_has_one_table_of_a_repeated_step_and_one_configuration(tmp_path: Path) -> None:
    for attempt in (1, 2):
        sink = TensorBoard(tmp_path, CONFIG)
        sink.begin(attempt - 1)
        for step in (1, 2) if attempt == 1 else (2, 3):
            sink.write(step, {"loss": 0.5})
            sink.table(table(step, f"attempt {attempt}"))
        sink.artifacts(LEFT)
        sink.end(failed=False)
    found = texts_of(tmp_path, "samples")
    assert [step for step, _ in found] == [1, 2, 3]
    assert ["attempt 1" in text for _, text in found] == [True, False, False]
    assert "step 2, score 1.0, advantage 0.5" in found[1][1]
    assert "    1 | 2?\n    ```\n" in found[1][1], "a text cannot end its block"
    assert texts_of(tmp_path, "config") == [(0, "    trainer.optimizer.lr: 0.0625")]
    assert texts_of(tmp_path, "checkpoints")[-1][0] == 3
    assert "s3://bucket/step-00000004" in texts_of(tmp_path, "checkpoints")[-1][1]


def test_wandb_has_configuration_tables_and_the_page(tmp_path: Path) -> None:
    two_attempts(tmp_path, {"tensorboard": False, "wandb": {"project": "p", "offline": True}})
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1, "one run of W&B"
    assert [wandb_files.config(run)["trainer"] for run in runs] == [CONFIG["trainer"]] * len(runs)
    logged = [line for run in runs for line in wandb_files.history(run)]
    assert [line["loss"] for line in logged if "loss" in line] == [2.0, 1.5, 2.5, 2 + 1 / 3]
    samples = [(line["training_step"], line["samples"]) for line in logged if "samples" in line]
    assert [step for step, _ in samples] == [1, 2, 3], "a repeated step has its first table"
    assert [line["training_step"] for line in logged if "validation_samples" in line] == [2]
    (file,) = (file for run in runs for file in run.glob(f"files/{samples[2][1]}"))
    written = json.loads(file.read_text())
    assert written["columns"] == list(COLUMNS)
    assert written["data"] == [list(row) for row in table(3, "attempt 2").rows]
    (left,) = (one for run in runs for one in wandb_files.artifacts(run, "run"))
    assert left["metadata"] == LEFT.checkpoints and left["files"]["run.html"] == LEFT.page
    assert json.loads(left["files"]["checkpoints.json"]) == LEFT.checkpoints


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowSpec:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server's client is the same
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")  # for readers
    return MlflowSpec(tracking_uri=f"file://{tmp_path}/mlruns")


def test_mlflow_keeps_one_run_across_attempts(tracking: MlflowSpec) -> None:
    config = CONFIG | {f"field{i}": i for i in range(150)}
    first = Mlflow(tracking, "job", config)
    first.write(1, {"actor/loss": 0.5})
    first.end(failed=True)
    other = Mlflow(tracking, "another-job", {})
    second = Mlflow(tracking, "job", config | {"totalSteps": 9})
    assert second._client.get_run(second._run).info.status == "RUNNING"
    second.write(2, {"actor/loss": 0.25, "val/gcd/pass@8/mean": 0.75})
    second.end(failed=False)
    history = second._client.get_metric_history(second._run, "actor/loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25)]
    run = second._client.get_run(second._run)
    assert run.data.metrics["val/gcd/pass_8/mean"] == 0.75, "MLflow refuses @ in names"
    assert run.info.status == "FINISHED" and other._run != second._run
    assert run.data.params["trainer.optimizer.lr"] == "0.0625" and len(run.data.params) == 152


def test_mlflow_replaces_the_table_of_a_repeated_step(tracking: MlflowSpec) -> None:
    for attempt in (1, 2):
        sink = Mlflow(tracking, "job", CONFIG)
        for step in (1, 2) if attempt == 1 else (2, 3):
            sink.table(table(step, f"attempt {attempt}"))
    sink.artifacts(LEFT)
    files = [file.path for file in sink._client.list_artifacts(sink._run, "samples")]
    assert files == [f"samples/0000000{step}.json" for step in (1, 2, 3)]
    experiment = sink._client.get_run(sink._run).info.experiment_id
    frame = sink._client.load_table(experiment, files[1], run_ids=[sink._run])
    assert list(frame["response"]) == ["attempt 2", ""] and list(frame.columns) == list(COLUMNS)
    tags = sink._client.get_run(sink._run).data.tags
    assert tags["grpo.last_checkpoint"] == LEFT.checkpoints["last_checkpoint"]
    assert [one["path"] for one in json.loads(tags["mlflow.loggedArtifacts"])] == files
    page = sink._client.download_artifacts(sink._run, "run.html")
    assert Path(page).read_text() == LEFT.page


def test_the_tag_that_names_tables_stays_short(tracking: MlflowSpec) -> None:
    sink = Mlflow(tracking, "job", CONFIG)
    for step in range(30):
        sink.table(table(step))
    named = sink._client.get_run(sink._run).data.tags["mlflow.loggedArtifacts"]
    assert len(json.loads(named)) == 20 and "00000029.json" in named
    assert len(sink._client.list_artifacts(sink._run, "samples")) == 30


def read_trackio(folder: Path) -> dict[str, Any]:
    """Return what trackio has in a folder, in a process of its own."""
    code = (
        "import json, trackio\nfrom trackio.sqlite_storage import SQLiteStorage as store\n"
        "(run,) = trackio.Api().runs('grpo')\n"
        "use = trackio.init(project='grpo', name='reader', auto_log_gpu=False, auto_log_cpu=False)\n"
        "left = use.use_artifact('run-a-job:latest')\npath = left.download('left')\n"
        "files = {name: open(f'{path}/{name}').read() for name in ('run.html', 'checkpoints.json')}\n"
        "print('\\n' + json.dumps({'name': run.name, 'config': run.config, 'files': files,\n"
        "  'metadata': left.metadata, 'logs': store.get_logs('grpo', run.name)}))"
    )
    environment = {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    read = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        timeout=200,
        check=True,
        capture_output=True,
    )
    found = next(line for line in read.stdout.decode().splitlines() if line.startswith("{"))
    return dict(json.loads(found))


def test_trackio_has_configuration_tables_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="the images and uv.lock have no trackio: pip install trackio")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    two_attempts(tmp_path, {"tensorboard": False, "trackio": {}})
    found = read_trackio(tmp_path)
    assert found["name"] == "a-job" and found["config"]["trainer.optimizer.lr"] == "0.0625"
    losses = [(line["step"], line["loss"]) for line in found["logs"] if "loss" in line]
    assert sorted(losses) == [(1, 2.0), (2, 1.5), (2, 2.5), (3, 2 + 1 / 3)]
    samples = {line["step"]: line["samples"]["_value"] for line in found["logs"] if "samples" in line}
    assert sorted(samples) == [1, 2, 3] and samples[2] == named(table(2, "attempt 1"))
    assert sum("samples" in line for line in found["logs"]) == 3, "a repeated step has its first table"
    assert [line["step"] for line in found["logs"] if "validation_samples" in line] == [2]
    assert found["metadata"] == LEFT.checkpoints and found["files"]["run.html"] == LEFT.page
    assert json.loads(found["files"]["checkpoints.json"]) == LEFT.checkpoints


def named(of: SampleTable) -> Sequence[dict[str, Any]]:
    return [dict(zip(of.columns, row, strict=True)) for row in of.rows]


def test_a_sink_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as in an image without it
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    spec = ObservabilitySpec.model_validate({"tensorboard": False, "trackio": {}})
    (opening,) = sinks_of(spec, "job", JobFolder(tmp_path, tmp_path), CONFIG)
    with pytest.raises(ImportError):
        opening.open()
    assert "pip install trackio" in opening.remedy


def test_each_sink_is_configured_by_its_field(tmp_path: Path) -> None:
    spec = {"wandb": {"project": "p"}, "mlflow": {"trackingUri": "http://mlflow"}, "trackio": {}}
    found = sinks_of(ObservabilitySpec.model_validate(spec), "job", JobFolder(tmp_path, tmp_path), {})
    assert [one.name for one in found] == ["TensorBoard", "W&B", "MLflow", "trackio"]
    assert not sinks_of(ObservabilitySpec(tensorboard=False), "job", JobFolder(tmp_path, tmp_path), {})
