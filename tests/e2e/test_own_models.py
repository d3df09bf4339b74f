"""Published models, verl's data and a user's reward: trained, exported, served, and trained again."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_devcluster.paths import JOB_DATA
from grpo_devcluster.report import GAP, load
from grpo_devcluster.settings import GATEWAY
from grpo_worker.data.tokenizer import load_tokenizer
from support import sglang_server
from support.faults import until
from support.jobs import ENDED, Start
from support.published_models import job as own_model
from support.stand_in_hub import StandInHub

pytestmark = pytest.mark.slow  # several jobs; benchmarks/own_models.py runs all models
ROOT = JOB_DATA / "own"
PROMPT = "Mara packs 6 boxes."


def _run(start: Start, name: str, spec: dict[str, Any]) -> tuple[Any, dict[str, Any], Path]:
    job = start(name, **({"steps": spec.pop("totalSteps")} | spec))
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded", status
    return job, status, job.store()


def _trained(store: Path) -> None:
    records = load(store)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert max(record[GAP] for record in records) < 1e-4, "trainer and engine compute the same"
    assert records[-1]["reward/failures"] == 0
    assert all(record["critic/score/mean"] > 0 for record in records)


def _answers(export: Path, folder: Path) -> None:
    """The export answers in SGLang, with the tokens that transformers finds likeliest."""
    tokenizer = load_tokenizer(str(export))
    ids = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    found = model.generate(
        torch.tensor([ids]), max_new_tokens=8, min_new_tokens=8, do_sample=False, top_k=None, top_p=None
    )
    with sglang_server.serving(export, folder) as url:
        assert sglang_server.greedy(url, ids, 8) == found[0, len(ids) :].tolist()
        answer = sglang_server.chat(url, PROMPT)
    assert answer["usage"]["prompt_tokens"] == len(ids), "it knows the chat template"


def test_qwen3_8b_with_verls_gsm8k_and_a_reward_function(start: Start, tmp_path: Path) -> None:
    own_model.write_files(ROOT, "Qwen3-8B", "published")
    spec = own_model.job_spec(ROOT, "Qwen3-8B", {"tensor": 2, "expertTensor": 2})
    job, status, store = _run(start, "qwen3", spec)
    config = json.loads((ROOT / "models" / "Qwen3-8B" / "generation_config.json").read_text())
    assert status["tokens"] == {
        "end": config["eos_token_id"], "pad": config["pad_token_id"], "chatTemplate": True
    }  # fmt: skip
    assert status["data"]["rows"] == 4
    _trained(store)
    _answers(store / "export" / "step-00000003", tmp_path)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def test_deepseek_v3_saved_by_transformers_5_and_a_second_job_from_its_export(
    start: Start, tmp_path: Path
) -> None:
    own_model.write_files(ROOT, "DeepSeek-V3", "transformers-5")
    layout = {"tensor": 2, "expert": 2, "expertTensor": 1}
    spec = own_model.job_spec(ROOT, "DeepSeek-V3", layout)
    spec["data"] |= {"train": "/data/gsm8k.jsonl"}
    spec["algorithm"] |= {"topP": 0.95, "topK": 50, "minP": 0.01, "stop": ["####"]}
    spec["rollout"]["template"]["engine"]["tokenizer"] = True
    job, status, store = _run(start, "deepseek", spec)
    assert status["tokens"]["end"] == [1] and status["tokens"]["chatTemplate"]
    _trained(store)
    export = store / "export" / "step-00000003"
    _answers(export, tmp_path)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    _second_job(start, export, layout)


def _second_job(start: Start, export: Path, layout: dict[str, int]) -> None:
    """It fetches the export from a mirror of the hub, with a token and a digest, and trains on MATH."""
    files = {file.name: file.read_bytes() for file in export.iterdir()}
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    with StandInHub(files, "own/export", token="let-me-in", address=GATEWAY) as hub:
        spec = own_model.job_spec(ROOT, "DeepSeek-V3", layout)
        spec["model"]["volume"] = {
            "mountPath": "/models/DeepSeek-V3",
            "uri": "hf://own/export",
            "endpoint": hub.url,
            "digest": f"sha256:{digest}",
            "credential": {"secret": "hub"},
        }
        spec["data"] |= {"train": "/data/math.jsonl"}
        spec["reward"] = {"builtin": "math"}
        spec["checkpoint"] |= {"exportAtEnd": False}
        job = start("from-export", steps=spec.pop("totalSteps"), **spec)
        until("the job says what it lacks", lambda: "kubectl create secret" in _message(job), 120)
        job.kubectl("create", "secret", "generic", "hub", "--from-literal=token=let-me-in")
        status = job.wait(ENDED, 600)
        assert status["phase"] == "Succeeded", status
        assert len(hub.reads("model-00000-00000.safetensors")) == 1, "fetched once for all pods"
    assert [record["step"] for record in load(job.store())] == [1, 2, 3]
    job.kubectl("delete", "secret", "hub")
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _message(job: Any) -> str:
    return " ".join(condition["message"] for condition in job.status().get("conditions", []))


@pytest.fixture(autouse=True)
def _clean() -> None:
    import shutil

    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "models").mkdir(parents=True)
