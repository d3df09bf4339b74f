"""Real engines that compute another function than the trainers: no step is trained on what they sample."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.controller.model_files import open_model
from support.machines import Machines, machines
from support.objects import job
from support.whole_job import whole_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # four engines, one after the other in a job
REFUSED = 300.0  # seconds on two cores that run everything
# In float32 both sides agree to some millionths.
ALGORITHM = job()["spec"]["algorithm"] | {"maxLogProbGap": 1e-4}
GAP = "trainer and engines disagree: mean |log-prob difference| "


def _override(**fields: Any) -> dict[str, Any]:
    """Return the fields of an engine that computes with other values than its config.json has."""
    return {"extra_args": ["--json-model-override-args", json.dumps(fields)]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    other = folder / "other-model"
    other.mkdir()
    config = open_model("preset:tiny-moe").config
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    theta = _override(
        rope_theta=100.0, rope_scaling=architecture("tiny-moe")["rope_scaling"] | {"rope_theta": 100.0}
    )
    with machines(folder, {}, {"model": str(other)}, theta, _override(topk_group=1)) as running:
        yield running


def test_the_same_configuration_is_trained(running: Machines, tmp_path: Path) -> None:
    with whole_job(running, tmp_path, 1, engines=running.engines[:1], algorithm=ALGORITHM) as job:
        assert len(job.finish(REFUSED).weights) == 1


@pytest.mark.fault(
    row="29",
    point="a real engine has another epsilon of the norms in its config.json, or computes with "
    "another base of the rotary embedding or other router groups",
    witness="the message names the field, or the gap of the log-probabilities",
    bound="refused in 300 s, before the first step",
    compared="with an engine of the same configuration the job trains; otherwise no step, sample or "
    "checkpoint",
)
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "engine-1 runs another model than the trainer: rms_norm_eps: trainer 1e-06, engine 0.001"),
        (2, GAP),
        (3, GAP),
    ],
    ids=["epsilon of the norms", "base of the rotary embedding", "groups of the router"],
)
def test_another_configuration_is_refused(running: Machines, tmp_path: Path, number: int, words: str) -> None:
    engines = running.engines[number : number + 1]
    with whole_job(running, tmp_path, 1, engines=engines, algorithm=ALGORITHM) as job:
        job.allow(1)
        message = job.await_phase("Failed", REFUSED)
    print(message)
    assert message.startswith(words)
    for name in ("ledger", "metrics"):
        file = tmp_path / "job" / f"{name}.jsonl"
        assert not file.exists() or not file.read_text(), "a step was trained"
    assert not list((tmp_path / "job").glob("checkpoints/step-*")), "its weights were saved"
