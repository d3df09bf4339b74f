"""Sources of jobs that start from another job's checkpoint."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.resume_status import ResumedFromStatus
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.fork import fork_source, missing_checkpoint
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status
from grpo_operator.render.config_map import job_config_map
from support.objects import NOW, job, pool_of, running, spec_of

FOLDER = "/store/default-source-abcdef12"


def _source(phase: str = "Training", last: int | None = 50, **spec: Any) -> dict[str, Any]:
    made = job(**spec)
    made["metadata"] |= {"name": "source", "uid": "abcdef12-3456"}
    made["status"] = {"phase": phase} | ({"lastCheckpoint": {"step": last}} if last else {})
    return made


def _fork(**resume_from: Any) -> dict[str, Any]:
    made = job()
    made["spec"]["checkpoint"]["resumeFrom"] = resume_from or {"job": "source"}
    return made


def _resolve(fork: dict[str, Any], *others: dict[str, Any]) -> tuple[ResumedFromStatus | None, str]:
    jobs = {("default", other["metadata"]["name"]): other for other in others}
    return fork_source(fork, spec_of(fork), jobs), missing_checkpoint(fork, spec_of(fork), jobs)


def test_a_source_whose_checkpoints_go_with_it_is_refused() -> None:
    source = _source()
    source["metadata"]["deletionTimestamp"] = NOW
    assert _resolve(_fork(), source)[0] == ResumedFromStatus(folder=FOLDER), "they stay"
    source["spec"]["checkpoint"] = source["spec"]["checkpoint"] | {"deletionPolicy": "Delete"}
    with pytest.raises(RefusedError, match="is being deleted together with its checkpoints") as refused:
        _resolve(_fork(), source)
    assert refused.value.reason == "SourceUnfit"


def test_the_folder_of_a_job_is_that_of_its_uid() -> None:
    assert _resolve(_fork(), _source()) == (ResumedFromStatus(folder=FOLDER), "")
    assert _resolve(_fork(path="/store/x")) == (ResumedFromStatus(folder="/store/x"), "")
    assert _resolve(job(), _source()) == (None, "")


@pytest.mark.parametrize(
    ("fork", "source", "reason", "texts"),
    [
        (_fork(job="sauce"), _source(), "SourceNotFound", ["resumeFrom.job=sauce", "set spec.checkpoint"]),
        (_fork(job="tiny-moe"), _source(), "SourceUnfit", ["cannot start from its own"]),
        (
            _fork(),
            _source(checkpoint={"store": {"pvc": "other"}}),
            "SourceUnfit",
            ["is pvc other", "path /var/lib", "use the same store"],
        ),
        (
            _fork(),
            _source(checkpoint={"store": {"uri": "s3://runs/x"}}),
            "SourceUnfit",
            ["is uri s3://runs/x", "path /var/lib", "or a bucket of the same server"],
        ),
        (_fork(), _source(model={"path": "preset:tiny-qwen3"}), "SourceUnfit", ["path is preset:tiny"]),
        (_fork(), _source("Succeeded", 120), "SourceUnfit", ["totalSteps=120", "set more than 120"]),
        (_fork(), _source("Failed", None), "SourceUnfit", ["it has none, and it has ended"]),
        (_fork(job="source", step=70), _source("Failed"), "SourceUnfit", ["its newest is of step 50"]),
    ],
)  # fmt: skip
def test_a_source_that_cannot_become_right_is_refused(
    fork: dict[str, Any], source: dict[str, Any], reason: str, texts: list[str]
) -> None:
    with pytest.raises(RefusedError) as refused:
        _resolve(fork, source)
    assert refused.value.reason == reason
    assert all(text in str(refused.value) for text in texts), str(refused.value)


def _in_bucket(made: dict[str, Any], **store: str) -> dict[str, Any]:
    made["spec"]["checkpoint"] = made["spec"]["checkpoint"] | {"store": {"uri": "s3://runs/b"} | store}
    return made


def test_of_a_bucket_the_folder_is_a_uri() -> None:
    source = _in_bucket(_source(), uri="s3://other/a/", secret="its-own")
    assert _resolve(_in_bucket(_fork()), source)[0] == ResumedFromStatus(
        folder="s3://other/a/default-source-abcdef12"
    )
    named = _in_bucket(_fork(uri="s3://gold/x/step-00000010"))
    assert _resolve(named) == (ResumedFromStatus(folder="s3://gold/x/step-00000010"), "")
    with pytest.raises(RefusedError, match="or a bucket of the same server"):
        _resolve(_in_bucket(_fork(), endpoint="http://s3:9000"), source)


def test_a_fork_with_the_weights_alone_may_have_fewer_steps() -> None:
    assert _resolve(_fork(job="source", load="weights"), _source("Succeeded", 500))[0] is not None


@pytest.mark.parametrize(("last", "step"), [(None, None), (50, 60)])
def test_a_fork_waits_for_a_checkpoint_of_a_job_that_runs(last: int | None, step: int | None) -> None:
    fork = _fork(job="source") if step is None else _fork(job="source", step=step)
    found, missing = _resolve(fork, _source(last=last))
    assert found is not None and missing.endswith("waiting for it")


def test_a_fork_that_waits_for_a_checkpoint_holds_no_nodes() -> None:
    cache = Cache()
    fork, source = _fork(), _source(last=None)
    for made in (fork, source):
        made["metadata"]["creationTimestamp"] = NOW
        cache.jobs["default", made["metadata"]["name"]] = made
    round_ = AdmissionRound(cache)
    round_.update()
    assert round_.wait_reason(("GRPOJob", "default", "tiny-moe")) == ""  # type: ignore[arg-type]
    source["status"] |= {"lastCheckpoint": {"step": 5}}
    round_.update()
    assert "waiting for other jobs" in round_.wait_reason(("GRPOJob", "default", "tiny-moe"))  # type: ignore[arg-type]


def test_the_source_stays_when_its_job_is_deleted_and_reaches_the_controller() -> None:
    fork = _fork()
    spec, (source, _) = spec_of(fork), _resolve(fork, _source())
    layout = layout_status(resolve(spec, pool_of(spec)))
    seen = running(resumed_from=f"{FOLDER}/checkpoints/step-00000050.attempt-1")
    fork["status"] = job_status(fork, spec, layout, pool_of(spec), seen, NOW, source=source).wire()
    found, missing = _resolve(fork)
    assert found is not None and found.folder == FOLDER and missing == ""
    assert found.checkpoint == f"{FOLDER}/checkpoints/step-00000050.attempt-1"
    later = job_status(fork, spec, layout, pool_of(spec), running(), NOW, source=found)
    assert later.resumed_from == found, "a controller that restarts does not know it any more"
    config = job_config_map(fork, spec, "x", pool_of(spec), fork_from=found.folder)["data"]["job.json"]
    assert f'"forkFrom": "{FOLDER}"' in config
