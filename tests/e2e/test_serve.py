"""A finished job is exported and served by ``kubectl grpo serve``: the answers are those of its model.

So were those of its last validation, which its own engines gave with the weights that the trainers sent.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import binary
from grpo_worker.samples.reader import samples
from support.faults import agent, kill_container, until
from support.greedy import exported_model, greedy
from support.jobs import ENDED, Start

pytestmark = pytest.mark.slow  # a job, an export, and an engine that loads it twice: five minutes
STEPS, NEW_TOKENS = 5, 12
POOL = f"served-{STEPS}"
PROMPT = [5, 9, 31, 7, 44, 12, 60, 3]
SELECTOR = f"rl.grpo.dev/rolloutpool={POOL},rl.grpo.dev/pool=rollout"
SET, VALIDATED = "gcd", 32  # a validation set, and its prompts
# Prompts of many lengths: to prompts that are nearly the same a model without training says the same.
PROMPTS = "reasoning-gym:gcd?min_numbers=2&max_numbers=4&min_value=1&max_value=999"
VALIDATION = {
    "sets": [{"name": SET, "data": PROMPTS, "prompts": VALIDATED}],
    "beforeTraining": False,
    "everySteps": STEPS,
    "temperature": 0,
    "responseLength": NEW_TOKENS,
}


class Served(NamedTuple):
    """A job whose last checkpoint is served. ``ends``: tokens that end its responses."""

    store: Path
    ends: list[int]

    @property
    def export(self) -> Path:
        return self.store / "export" / f"checkpoint-{STEPS}"


@pytest.fixture(scope="module")
def served(kubeconfig: Path, start: Start) -> Iterator[Served]:
    """Train a job to its end, validate its last weights, and serve their checkpoint."""
    # A few steps at the manifest's rate leave a model that answers every prompt with one token.
    job = start("served", steps=STEPS, lr=1e-6, validation=VALIDATION)
    status = job.wait(ENDED, 300)
    assert status["phase"] == "Succeeded", status
    command = [sys.executable, "-m", "grpo_operator.cli.kubectl.main", "serve", job.name, "--wait=300"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "KUBECTL": str(binary("kubectl"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yield Served(job.store(), status["tokens"]["end"])
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


def test_greedy_answers_of_a_validation_are_those_of_transformers_on_the_export(served: Served) -> None:
    rows = list(samples(served.store, STEPS, of=SET))
    assert len(rows) == VALIDATED and {row["version"] for row in rows} == {STEPS}
    model = exported_model(served.export)
    for row in rows:
        assert row["answer_ids"] == greedy(model, row["prompt_ids"], NEW_TOKENS, served.ends), row["prompt"]
    assert len({tuple(row["answer_ids"]) for row in rows}) > 1, "the answers depend on the prompts"


def test_a_finished_job_is_served_also_after_its_engine_has_died(served: Served, kubeconfig: Path) -> None:
    until("it serves", lambda: _serves(kubeconfig), 300)
    expected = greedy(exported_model(served.export), PROMPT, NEW_TOKENS)
    assert _greedy(kubeconfig) == expected
    (pod,) = _get(kubeconfig, "pods", "-l", SELECTOR)["items"]
    kill_container(pod, "engine")
    until("its server is lost", lambda: agent(pod)["restarts"] == 1, 60)
    until("it serves again", lambda: agent(pod)["state"] == "SERVING", 300)
    assert until("an answer", lambda: _greedy(kubeconfig), 60) == expected
