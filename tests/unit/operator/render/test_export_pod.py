"""The pod that exports a checkpoint has what the job's controller has, and reads the model's small files."""

import json
import shlex
from typing import Any

from grpo_operator.api.v1alpha1.export_status import ExportState, ExportStatus
from grpo_operator.api.v1alpha1.model import ModelSpec
from grpo_operator.plan.planner.host_memory import export_memory
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.render.export_pod import export_pod
from grpo_operator.settings import OperatorSettings
from support.objects import NOW, job, spec_of

SETTINGS = OperatorSettings("trainer:2", "rollout:2")
VOLUME = {"pvc": "models", "mountPath": "/models"}


def _pod(request: str = "step=5", **spec: Any) -> dict[str, Any]:
    manifest = job(**spec)
    export = ExportStatus(request=request, state=ExportState.RUNNING, step=5, requested_at=NOW)
    return export_pod(manifest, spec_of(manifest), export, SETTINGS)


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def test_it_runs_the_program_once_with_the_request() -> None:
    pod = _pod("step=5 quantization=fp8-block128", checkpoint={"store": {"pvc": "runs"}})
    assert pod["metadata"]["labels"] == {"rl.grpo.dev/job": "tiny-moe", "rl.grpo.dev/pool": "export"}
    assert pod["spec"]["restartPolicy"] == "Never"
    (command,) = _container(pod)["args"]
    program, text = shlex.split(command.partition("-m ")[2])[:2]
    assert program == "grpo_worker.megatron.export.offline"
    given = json.loads(text)
    assert given["folder"] == "/store/default-tiny-moe-12345678" and given["store"]["pvc"] == "runs"
    assert (given["step"], given["quantization"]) == (5, "fp8-block128")
    assert given["name"] == "checkpoint-5-fp8-block128"
    assert ModelSpec.model_validate(given["model"]) == spec_of(job()).model


def test_each_request_has_a_pod_of_its_own() -> None:
    names = {_pod(request)["metadata"]["name"] for request in ("step=5", "step=5 at=2")}
    assert len(names) == 2 and all(name.startswith("tiny-moe-12345678-export-") for name in names)


def test_it_writes_to_the_jobs_folder_only_and_has_no_key() -> None:
    pod = _pod(checkpoint={"store": {"pvc": "runs"}})
    mounts = {m["mountPath"]: m for m in _container(pod)["volumeMounts"] if m["name"] == "store"}
    assert set(mounts) == {"/store/default-tiny-moe-12345678"}
    assert "key" not in {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_the_models_volume_is_mounted_read_only() -> None:
    pod = _pod(model={"path": "/models/x", "architecture": "qwen3-8b", "volume": VOLUME})
    (mount,) = [m for m in _container(pod)["volumeMounts"] if m["mountPath"] == "/models"]
    assert mount["readOnly"] is True
    assert mount["name"] in {volume["name"] for volume in pod["spec"]["volumes"]}


def test_its_memory_does_not_grow_with_the_model() -> None:
    def gib(architecture: str) -> float:
        config = ModelSpec(path="/models/x", architecture=architecture).config()
        assert config is not None
        return export_memory(ModelShape.from_hf(config)) / 2**30

    small, large = gib("qwen3-8b"), gib("deepseek-v3")
    assert small < large < 14, "671 against 8 billion parameters"
    assert export_memory(None) / 2**30 >= large / 2
    tiny = _container(_pod())["resources"]["requests"]
    assert tiny["memory"] == "1537Mi" and tiny["cpu"] == "100m", "beside a job that has all cores"
