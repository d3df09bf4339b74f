"""Another way to train, whole: PPO on files with a reward function, packed, offloaded, with routing
replay and multi-token prediction.
"""

import copy
import json
from pathlib import Path
from typing import Any

import first_weights
import pytest
import torch
import yaml
from safetensors import safe_open

from grpo_devcluster.paths import JOB_DATA, REPO
from grpo_devcluster.report import GAP, load
from grpo_worker.model_files.config import model_config
from support.jobs import ENDED, Start

STEPS, SAMPLES = 6, 16
WITH_NEXT = model_config("preset:tiny-moe") | {"num_nextn_predict_layers": 1}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 8 == 7:
        raise RuntimeError("one prompt of each step cannot be judged")
    return float(len(solution_str)) / 8
"""


@pytest.fixture
def ppo() -> dict[str, Any]:
    """Changes to the tiny job; its files lie where the pods see the store."""
    rows = [{"question": f"{a} and {a + 3}:\n", "answer": str(a)} for a in range(1, 33)]
    JOB_DATA.mkdir(parents=True, exist_ok=True)
    (JOB_DATA / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (JOB_DATA / "reward.py").write_text(REWARD)
    first_weights.write(JOB_DATA / "with-next-tokens", WITH_NEXT, seed=1)
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    rollout = copy.deepcopy(spec["rollout"])
    rollout["template"] |= {"replicas": 1}
    rollout["template"]["engine"]["returnRoutedExperts"] = True
    return {
        "mode": "colocated",  # on CPUs: the engine's pod beside a training pod
        "model": {"path": "/store/with-next-tokens", "multiTokenPrediction": True},
        "checkpoint": {"store": {"path": str(JOB_DATA)}, "everySteps": 100, "exportAtEnd": True},
        "data": spec["data"] | {"train": "/store/prompts.jsonl", "promptKey": "question"},
        "reward": {"function": "/store/reward.py:compute_score", "memoryMegabytes": 512, "workers": 2},
        "algorithm": {
            "advEstimator": "gae",
            "critic": {"lam": 0.95, "warmupSteps": 1, "optimizer": {"lr": 0.001}},
            "samplesPerPrompt": SAMPLES,
            "useKlLoss": False,
            "useKlInReward": True,
            "entropyCoef": 0.001,
            "routingReplay": True,
        },
        "trainer": spec["trainer"]
        | {"maxTokensPerGpu": 1024, "offload": {"parameters": True, "gradients": True, "optimizer": True}},
        "rollout": rollout,
    }


@pytest.mark.slow  # a whole job more
def test_ppo_on_files_packed_and_with_the_engines_experts(start: Start, ppo: dict[str, Any]) -> None:
    job = start("ppo", steps=STEPS, **ppo)
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded", status
    records = load(job.store())
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert "actor/pg_loss" not in records[0], "the first step warms up the critic alone"
    assert all("actor/pg_loss" in r and r["actor/entropy"] > 0 for r in records[1:])
    expected = [r["critic/vpred_mean"] for r in records]
    assert expected[0] == 0 and expected == sorted(expected), "the critic learns that answers are rewarded"
    assert [r["reward/failures"] for r in records] == [SAMPLES * step for step in range(1, STEPS + 1)]
    assert max(r[GAP] for r in records) < 1e-4, "engines that do not draft take no notice of the next layer"
    assert all(r["moe/load_ratio/max"] >= 1 for r in records[1:])
    _next_tokens_were_trained(job.store(), records)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _next_tokens_were_trained(folder: Path, records: list[dict[str, Any]]) -> None:
    """The layer after the last was loaded, trained and exported."""
    losses = [r["actor/mtp_loss"] for r in records[1:]]
    assert losses[-1] < losses[0]
    name = f"model.layers.{WITH_NEXT['num_hidden_layers']}.eh_proj.weight"
    (exported,) = (folder / "export").glob("step-*")
    index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    first = JOB_DATA / "with-next-tokens" / "model.safetensors"
    with safe_open(exported / index[name], "pt") as after, safe_open(first, "pt") as before:
        assert not torch.equal(after.get_tensor(name), before.get_tensor(name))
