"""Every manifest is planned: it fits, its engines can be built, and its step is estimated."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.cli.plan import main

FILES = sorted((REPO / "manifests").glob("*.yaml"))
LARGE = [file for file in FILES if "gpu" not in file.stem and file.stem != "tiny-moe"]


def _plan(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([str(file), "--json"]) == 0, capsys.readouterr().out
    (plan,) = json.loads(capsys.readouterr().out)
    return dict(plan)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_manifest_is_planned_without_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(file, capsys)
    assert plan["stages"], "the model is not known"
    if file.stem == "tiny-moe":
        return
    assert max(stage["total"] for stage in plan["stages"]) <= plan["usable_per_gpu"]
    assert plan["engine"]["kv_tokens"] > 0 and 0 < plan["step"]["seconds"] < 3600


@pytest.mark.parametrize("file", LARGE, ids=lambda file: file.stem)
def test_a_manifest_is_named_for_its_gpus(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(file, capsys)
    pools, shared = plan["pools"], plan["mode"] == "colocated"
    count = pools["trainer"]["gpus"] + (0 if shared else pools["rollout"]["gpus"])
    assert file.stem.endswith(f"-{count}x{GpuType(pools['trainer']['gpu_type']).value.split('-')[0]}")


def test_deepseek_v3_cannot_be_trained_on_128_h100s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = yaml.safe_load((REPO / "manifests" / "deepseek-v3-128xh200.yaml").read_text())
    trainer = body["spec"]["trainer"]
    trainer |= {"nodes": 16, "gpuType": "h100-80gb", "parallelism": {"auto": True}}
    trainer["offload"] = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body))
    assert main([str(tmp_path / "job.yaml")]) == 1
    assert "no layout of 128 GPUs fits" in capsys.readouterr().out
