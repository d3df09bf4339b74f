"""Parts of ``kubectl grpo`` that need no cluster."""

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.cli.kubectl import events
from grpo_operator.cli.kubectl.global_options import hoisted
from grpo_operator.cli.kubectl.metrics_table import metrics_table
from grpo_operator.cli.kubectl.pods import LogTarget, Part
from grpo_operator.cli.kubectl.sample_view import sample_lines
from grpo_operator.cli.kubectl.status_view import job_view, jobs_table
from grpo_operator.client.fork_manifest import fork, parsed
from grpo_operator.client.resumption import resumption
from grpo_operator.client.samples_command import samples_command
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status
from support.objects import NOW, job, pool_of, running, spec_of


def _text(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=1000, no_color=True)
    console.print(what)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def _with_status(**values: Any) -> dict[str, Any]:
    manifest = job()
    spec = spec_of(manifest)
    layout = layout_status(resolve(spec, pool_of(spec)))
    status = job_status(manifest, spec, layout, pool_of(spec), running(**values), NOW)
    return manifest | {"status": status.wire()}


def test_a_job_is_shown_with_progress_engines_and_events() -> None:
    engines = [{"name": "engine-0", "state": "SERVING", "weightVersion": 7, "restarts": 2}]
    text = _text(job_view(_with_status(step_seconds=60.0), engines, ["now  grpojob/tiny-moe  Training: go"]))
    for line in (
        "phase",
        "Training",
        "7/120",
        "eta 1h53m",
        "train 2/2, rollout 2/2",
        "v7",
        "1 by the infra",
        "TP2 PP1 CP1 EP2 DP1",
    ):
        assert line in text
    assert "engine-0" in text and "SERVING" in text and "grpojob/tiny-moe  Training: go" in text
    assert "straggler" not in text, "what does not exist has no line"


def test_all_jobs_are_shown_with_what_they_wait_for() -> None:
    refused = job() | {
        "status": refused_status(job(), "Infeasible", "spec.trainer.nodes=64: add", NOW).wire()
    }
    lines = _text(jobs_table([refused, job()])).splitlines()
    assert "Invalid" in lines[1] and "Infeasible" in lines[1] and "spec.trainer.nodes=64: add" in lines[1]
    assert lines[2].split() == ["tiny-moe"], "a job that the operator has not seen yet"
    assert _text(jobs_table([job()], namespaces=True)).splitlines()[1].split() == ["default", "tiny-moe"]


def test_a_fork_starts_from_the_checkpoint_with_the_given_values() -> None:
    source = job(suspend=True)
    source["metadata"]["labels"] = {"team": "a"}
    changes = ["trainer.optimizer.lr=5e-7", "totalSteps=200", "scheduling.evictTrainers=true"]
    made = fork(source, "second", 40, dict(map(parsed, changes)))
    spec = GRPOJobSpec.model_validate(made["spec"])
    assert spec.trainer.optimizer.lr == 5e-7 and spec.total_steps == 200 and not spec.suspend
    assert spec.checkpoint.resume_from is not None and spec.checkpoint.resume_from.step == 40
    assert spec.checkpoint.resume_from.job == "tiny-moe" and spec.scheduling.evict_trainers
    assert made["metadata"] == {"name": "second", "namespace": "default", "labels": {"team": "a"}}
    assert "resumeFrom" not in source["spec"]["checkpoint"], "the source is not changed"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("lr", "PATH=VALUE"),
        ("=1", "PATH=VALUE"),
        ("totalSteps.x=1", "spec.totalSteps has no"),
        ("seed=[", "YAML"),
    ],
)
def test_a_change_of_a_fork_that_cannot_be_made_is_named(change: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fork(job(), "second", None, dict([parsed(change)]))


def _in_phase(phase: str, **spec: Any) -> dict[str, Any]:
    return job(**spec) | {"status": {"phase": phase}}


def test_a_job_is_resumed_by_what_its_phase_needs() -> None:
    suspended, failed = _in_phase("Suspended", suspend=True), _in_phase("Failed")
    assert resumption(suspended, None, NOW, "a/b") == {"spec": {"suspend": False}}
    assert resumption(failed, None, NOW, "a/b") == {"metadata": {"annotations": {"a/b": NOW}}}
    assert resumption(_in_phase("Succeeded"), 200, NOW, "a/b") == {"spec": {"totalSteps": 200}}
    for job_, steps, text in (
        (_in_phase("Succeeded"), None, "--steps"),
        (_in_phase("Succeeded"), 120, "all of its 120 steps"),
        (_in_phase("Training"), None, "its phase is Training"),
    ):
        with pytest.raises(ValueError, match=text):
            resumption(job_, steps, NOW, "a/b")


def test_options_of_kubectl_may_follow_the_command() -> None:
    given = ["status", "a", "-n", "rl", "--context=dev", "-o", "json", "-A"]
    assert hoisted(given) == ["-n", "rl", "--context=dev", "status", "a", "-o", "json", "-A"]
    assert hoisted(["profile", "a", "--", "-n"]) == ["profile", "a", "--", "-n"]
    assert hoisted(["status", "-n"]) == ["-n", "status"]


def _event(name: str, at: str, **more: Any) -> dict[str, Any]:
    about = {"kind": "Pod", "name": name}
    return {"involvedObject": about, "lastTimestamp": at, "reason": "Killing", "metadata": {}} | more


def test_events_of_a_job_are_those_of_its_objects_in_order() -> None:
    found = events.of_job(
        [
            _event("a-trainer-0", "2026-01-02T00:00:00Z", count=3, message="x\n y"),
            _event("ab", "2026-01-01T00:00:00Z"),
            _event("a", "2026-01-01T00:00:00Z"),
        ],
        "a",
    )
    assert events.lines(found) == [
        "2026-01-01T00:00:00Z  pod/a  Killing: ",
        "2026-01-02T00:00:00Z  pod/a-trainer-0  Killing (x3): x y",
    ]


def test_metrics_are_chosen_by_parts_of_their_names() -> None:
    steps: list[dict[str, Any]] = [
        {"step": 1, "critic/score/mean": 0.51234, "actor/loss": 2.0, "digests": {}},
        {"step": 2, "actor/loss": 1.5},
    ]
    assert _text(metrics_table(steps, [])).split() == [
        "step", "critic/score/mean", "actor/loss", "1", "0.5123", "2", "2", "1.5"
    ]  # fmt: skip
    assert _text(metrics_table(steps, ["loss"])).split() == ["step", "actor/loss", "1", "2", "2", "1.5"]


def _sample(**changes: Any) -> dict[str, Any]:
    return {
        "step": 7, "prompt_index": 3, "prompt": "gcd?\nof 4 and 6", "uid": "3.0", "answer": "2", "score": 1.0,
        "advantage": 0.70711, "log_prob_gap_mean": 0.00012345, "version": 6, "engine": "e-0", "dropped": None,
    } | changes  # fmt: skip


@pytest.mark.parametrize("quoted", ["[/tmp/ray] and [bold]", "\x1b[31mred\x1b[0m\x07", "\U0001f680"])
def test_messages_may_quote_any_output(quoted: str) -> None:
    found = _with_status(message=quoted, last_failure=quoted)
    engines = [{"name": "engine-0", "state": "STALE", "message": quoted}]
    shown = _text(job_view(found, engines, [f"now  pod/a  Failed: {quoted}"])) + _text(jobs_table([found]))
    clean = {"\x1b[31mred\x1b[0m\x07": "red"}.get(quoted, quoted)
    assert shown.count(clean) >= 4 and "\x1b" not in shown
    assert list(sample_lines([_sample(answer=quoted)]))[-1].strip() == clean


def test_samples_are_shown_below_their_prompts() -> None:
    sample = _sample()
    other = sample | {"uid": "3.1", "answer": "", "score": None, "advantage": None, "dropped": "equal scores"}
    refused = sample | {
        "prompt_index": 4,
        "prompt": "long",
        "uid": None,
        "answer": None,
        "dropped": "too long",
    }
    assert list(sample_lines([sample, other, refused])) == [
        "PROMPT 3 of step 7",
        "    gcd?",
        "    of 4 and 6",
        "ANSWER 3.0, score 1, advantage 0.7071, log-prob gap 0.0001234, version 6, engine e-0",
        "    2",
        "ANSWER 3.1, log-prob gap 0.0001234, version 6, engine e-0, not trained on: equal scores",
        "PROMPT 4 of step 7",
        "    long",
        "NO ANSWER: too long",
    ]


def test_samples_have_the_parts_of_their_rewards() -> None:
    parts = {"format": 0.25, "cor\x1b[31mrect": 1 / 3}
    first, second = sample_lines([_sample(reward_parts=parts), _sample(reward_parts=None)]), _sample()
    lines = [line for line in first if line.startswith("ANSWER")]
    assert lines[0].startswith("ANSWER 3.0, score 1 (format 0.25, correct 0.3333), advantage 0.7071")
    assert lines[1].startswith("ANSWER 3.0, score 1, advantage 0.7071")
    assert lines[1] in sample_lines([second]), "a controller of an older version names no parts"


def test_samples_of_a_validation_name_their_set() -> None:
    none = {"advantage": None, "log_prob_gap_mean": None}
    first, second = (_sample(set=name, **none) for name in ("aime", "ma\x1b[31mth"))
    shown = list(sample_lines([first, first | {"uid": "3.1"}, second]))
    assert [line for line in shown if line.startswith("PROMPT")] == [
        "PROMPT 3 of aime, step 7", "PROMPT 3 of math, step 7",
    ]  # fmt: skip


def test_the_command_reads_samples_of_a_validation() -> None:
    assert samples_command(step=40, validation=True)[3:] == ["--step=40", "--validation"]
    assert samples_command(of="aime", prompt=3, tokens=True)[3:] == ["--set=aime", "--prompt=3", "--tokens"]


def test_logs_are_those_of_the_container_of_the_part() -> None:
    assert LogTarget.of(Part.TRAINER).arguments("a")[:4] == [
        "-l", "rl.grpo.dev/job=a,rl.grpo.dev/pool=trainer", "-c", "ray-worker",
    ]  # fmt: skip
