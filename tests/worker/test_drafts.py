"""Versions reach SGLang's own served and drafting models of an engine rank, bit by bit, or are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.cpu_engine import environment
from grpo_operator.api.catalog.architectures import architecture

TINY = architecture("tiny-moe") | {"num_nextn_predict_layers": 1}
WIDE = TINY | {  # of whole FP8 blocks
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip


def _ask(folder: Path, hf: dict[str, Any], mtp: bool = True, versions: int = 3, **shape: Any) -> Any:
    case = {"hf": hf, "shape": shape | {"drafts": True}, "mtp": mtp, "versions": versions}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.ranks.draft_cases"],
        env=os.environ | environment(folder) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps([case]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow  # each starts an engine with two models
@pytest.mark.parametrize(
    ("hf", "shape"),
    [
        pytest.param(TINY, {"tensor": 1}, id="whole"),
        pytest.param(TINY, {"tensor": 4}, id="a quarter"),
        pytest.param(WIDE, {"tensor": 1, "fp8": True}, id="FP8"),
    ],
)
def test_both_models_hold_what_sglang_loads_by_itself(
    hf: dict[str, Any], shape: dict[str, Any], tmp_path: Path
) -> None:
    found = _ask(tmp_path, hf, **shape)
    assert found["joined"] == [True, "joined [grpo direct loading]"]
    reports = []
    for (success, answer), of_draft in found["answers"]:
        assert success, answer
        assert of_draft == [success, answer], "SGLang answers with the last model's result"
        reports.append(json.loads(answer))
    assert len({report["checksum"] for report in reports}) == len(reports), "every version has other bytes"
    assert found["problems"] == [] and found["compared"] > 150 and found["differing"] == []


@pytest.mark.slow
def test_a_version_without_the_layer_that_drafts_is_refused(tmp_path: Path) -> None:
    found = _ask(tmp_path, TINY, mtp=False, versions=1, tensor=1)
    joined, answer = found["joined"]
    assert not joined
    assert "the version has no tensors of DeepseekV3ForCausalLMNextN, which drafts" in answer
    assert "spec.model.multiTokenPrediction" in answer
    assert ["another member gave up" in problem for problem in found["problems"]] == [True]
