"""Other ways to train, whole: PPO on files with a reward function, packed, offloaded, with routing
replay and multi-token prediction; one step ahead with answers that go on under new weights."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ENDED, Start, store_of
from faults import report, step_of, until, wait_step
from safetensors import safe_open

from grpo_devcluster.paths import JOB_DATA, REPO
from grpo_devcluster.report import GAP, load
from grpo_worker.megatron.presets import model_config

sys.path.insert(0, str(REPO / "benchmarks" / "learning"))

from start import write

STEPS, SAMPLES = 6, 16
WITH_NEXT = model_config("preset:tiny-moe") | {"num_nextn_predict_layers": 1}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 8 == 0:
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
    write(JOB_DATA / "with-next-tokens", WITH_NEXT, seed=1)
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    rollout = copy.deepcopy(spec["rollout"])
    rollout["template"]["engine"]["returnRoutedExperts"] = True
    return {
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


def test_ppo_on_files_packed_and_with_the_engines_experts(start: Start, ppo: dict[str, Any]) -> None:
    job = start("ppo", steps=STEPS, **ppo)
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded", status
    records = load(store_of(job))
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert "actor/pg_loss" not in records[0], "the first step warms up the critic alone"
    assert all("actor/pg_loss" in r and r["actor/entropy"] > 0 for r in records[1:])
    expected = [r["critic/vpred_mean"] for r in records]
    assert expected[0] == 0 and expected == sorted(expected), "the critic learns that answers are rewarded"
    assert [r["reward/failures"] for r in records] == [SAMPLES * step for step in range(1, STEPS + 1)]
    assert max(r[GAP] for r in records) < 1e-4, "engines that do not draft take no notice of the next layer"
    assert all(r["moe/load_ratio/max"] >= 1 for r in records[1:])
    _next_tokens_were_trained(store_of(job), records)
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


def test_a_job_whose_engines_compute_something_else_is_refused(start: Start) -> None:
    job = start("apart", steps=5, algorithm={"samplesPerPrompt": SAMPLES, "maxLogProbGap": 1e-12})
    status = job.wait(ENDED, 400)
    (message,) = [c["message"] for c in status["conditions"] if c["type"] == "Failed"]
    assert status["phase"] == "Failed" and (status.get("step") or 0) == 0
    assert "trainer and engines disagree" in message and "maxLogProbGap" in message
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def test_one_step_ahead_answers_go_on_and_none_is_lost_through_a_restart(start: Start) -> None:
    """Answers under way take new weights; prompts of a controller that dies are asked again."""
    steps = 12
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    data = manifest["data"] | {"responseLength": 64}
    job = start("partial", steps=steps, data=data, staleness={"maxVersionLag": 1, "partialRollouts": True})
    wait_step(job, 5)
    attempt = report(job)["attempt"]
    job.kubectl("delete", "pod", "-l", f"rl.grpo.dev/job={job.name},rl.grpo.dev/pool=controller", "--wait")
    until("a new attempt", lambda: step_of(job) >= 0 and report(job)["attempt"] > attempt, 240)
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded", status
    rows = [json.loads(line) for line in (store_of(job) / "ledger.jsonl").read_text().splitlines()]
    uids = [row["uid"] for row in rows]
    assert len(set(uids)) == len(uids) == steps * 8 * SAMPLES
    assert {int(uid.split(".")[0]) for uid in uids} == set(range(steps * 8)), "short ones were not favoured"
    for row in rows:
        versions = [version for version, _ in row.get("spans", [(row["version"], row["tokens"])])]
        assert versions == sorted(set(versions)), row
        assert set(versions) <= {max(row["step"] - 2, 0), row["step"] - 1}, row
        assert "spans" not in row or row["spans"][-1][1] == row["tokens"], row
    assert sum("spans" in row for row in rows) > 0, "the weights changed under no answer"
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
