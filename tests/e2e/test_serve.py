"""A finished job is exported and served by ``kubectl grpo serve``: the answers are those of its model."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import binary
from support.faults import agent, kill_container, until
from support.jobs import ENDED, Start

pytestmark = pytest.mark.slow  # a job, an export, and an engine that loads it twice: five minutes
STEPS, NEW_TOKENS = 5, 12
POOL = "served-5"
PROMPT = [5, 9, 31, 7, 44, 12, 60, 3]
SELECTOR = f"rl.grpo.dev/rolloutpool={POOL},rl.grpo.dev/pool=rollout"


@pytest.fixture
def served(kubeconfig: Path, start: Start) -> Iterator[Path]:
    """Train a job to its end, serve its last checkpoint, and yield the export's directory."""
    job = start("served", steps=STEPS)
    assert job.wait(ENDED, 300)["phase"] == "Succeeded"
    command = [sys.executable, "-m", "grpo_operator.cli.kubectl.main", "serve", job.name, "--wait=300"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "KUBECTL": str(binary("kubectl"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yield job.store() / "export" / f"checkpoint-{STEPS}"
    kubectl("delete", "rolloutpool", POOL, kubeconfig=kubeconfig)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _get(kubeconfig: Path, *what: str) -> dict[str, Any]:
    return dict(json.loads(kubectl("get", *what, "-o", "json", kubeconfig=kubeconfig)))


def _serves(kubeconfig: Path) -> bool:
    return bool((_get(kubeconfig, "rolloutpool", POOL).get("status") or {}).get("phase") == "Serving")


def _greedy(kubeconfig: Path) -> list[int]:
    """Return an answer through the Service, with the key of its users."""
    status = _get(kubeconfig, "rolloutpool", POOL)["status"]["serve"]
    key = base64.b64decode(_get(kubeconfig, "secret", status["secretName"])["data"]["api-key"]).decode()
    address = _get(kubeconfig, "service", f"{POOL}-serve")["spec"]["clusterIP"]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    assert httpx.post(f"http://{address}/generate", json=body, timeout=30).status_code == 401
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"http://{address}/generate", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    return list(answer.json()["output_ids"])


def test_a_finished_job_is_served_also_after_its_engine_has_died(served: Path, kubeconfig: Path) -> None:
    until("it serves", lambda: _serves(kubeconfig), 300)
    model = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as with ignore_eos; min_new_tokens would forbid the token
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = found[0, len(PROMPT) :].tolist()
    assert _greedy(kubeconfig) == expected
    (pod,) = _get(kubeconfig, "pods", "-l", SELECTOR)["items"]
    kill_container(pod, "engine")
    until("its server is lost", lambda: agent(pod)["restarts"] == 1, 60)
    until("it serves again", lambda: agent(pod)["state"] == "SERVING", 300)
    assert until("an answer", lambda: _greedy(kubeconfig), 60) == expected
