"""Manifests that the rehearsal's benchmark checks: which they are, and what counts."""

import json
from pathlib import Path

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_rehearsal import benchmark
from grpo_rehearsal.manifests import agrees, gpu_manifests, plan_fits


def test_every_manifest_with_gpus_is_checked_and_fits() -> None:
    found = list(gpu_manifests())
    names = {file.stem for file in (REPO / "manifests").glob("*.yaml")}
    assert {job.file.stem for job in found} == names - {"tiny-moe"}
    assert all(map(plan_fits, found))
    published = json.loads((REPO / "benchmarks" / "results" / "rehearsal.json").read_text())["figures"]
    assert published["manifests_checked"] == len(found)


def test_a_manifest_that_does_not_fit_is_found() -> None:
    (job,) = [job for job in gpu_manifests() if job.file.stem == "deepseek-v3-512xh100"]
    body = job.spec.wire()
    body["trainer"]["resources"] = {"memory": "4Gi"}
    assert not plan_fits(job._replace(spec=GRPOJobSpec.model_validate(body)))


def test_the_smallest_margins_are_those_of_known_waits_and_of_bounds() -> None:
    waits = [(4.0, False), (2.0, True), (None, False), (9.0, True), (None, True)]
    entries = [{"margin": margin, "upper_bound": bound} for margin, bound in waits]
    margins = benchmark._margins([{"deadlines": entries[:1]}, {"deadlines": entries[1:]}])
    assert margins == {"smallest_deadline_margin": 4.0, "smallest_deadline_margin_of_bounds": 2.0}
    assert set(benchmark._margins([{"deadlines": []}]).values()) == {None}


def test_the_figures_of_checkpoints_are_those_of_the_first_save_and_load() -> None:
    deadlines = [
        {"what": f"progress in {method} (restartPolicy.hangSeconds)", "margin": margin, "upper_bound": False}
        for method, margin in (("load_checkpoint", 8.0), ("save_checkpoint", 9.0), ("log_probs", 2.0))
    ]
    report = {
        "phase": "Succeeded",
        "ledger": {"consumed_twice": 0, "missing": 1},
        "steps": [{"save_checkpoint": 20.0}],
        "checkpoints": {"saves": [{"written": 80.0}, {"written": 90.0}], "loads": [{"seconds": 70.0}]},
        "deadlines": deadlines,
        "lost_node_recovery_seconds": 190.0,
    }
    assert benchmark.figures_of({"store-restore": report}) == {
        "livelocks": 0.0,
        "samples_consumed_twice": 0.0,
        "samples_missing": 1.0,
        "checkpoint_save_seconds_512": 20.0,
        "checkpoint_written_seconds_512": 80.0,
        "checkpoint_read_seconds_512": 70.0,
        "checkpoint_deadline_margin_512": 8.0,
        "store_restore_seconds_512": 190.0,
    }


def test_the_share_in_flight_is_that_of_more_samples_than_places() -> None:
    report = {
        "phase": "Succeeded",
        "ledger": {"consumed_twice": 0, "missing": 0},
        "generation": {"in_flight_share": 0.97},
    }
    assert benchmark.SCENARIOS["over-subscribed"] == ("--running", "512")
    assert benchmark.figures_of({"over-subscribed": report})["in_flight_share_512"] == 0.97


@pytest.mark.parametrize(
    ("planner", "sglang", "same"),
    [(1000, 1001, True), (1000, 1010, False), ("refused", 1000, False), (1000, "refused", False)],
)
def test_engines_agree_when_both_have_the_same_weights(
    planner: int | str, sglang: int | str, same: bool
) -> None:
    assert agrees({"planner": planner, "sglang": sglang}) is same


def test_only_manifests_that_pass_every_check_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [job.file.stem for job in gpu_manifests()]
    built, ended = [True] * len(files), ["Succeeded"] * len(files)
    built[0], ended[1] = False, "Failed"
    phases = dict(zip(files, ended, strict=True))

    def run(manifest: Path, name: str, options: tuple[str, ...]) -> dict[str, str]:
        assert name == benchmark.ALL_MANIFESTS and "--prompts" in options
        return {"phase": phases[manifest.stem]}

    monkeypatch.setattr(benchmark, "engines_built", lambda jobs: built)
    monkeypatch.setattr(benchmark, "run", run)
    passed = benchmark.check_manifests()
    assert [name for name, good in passed.items() if not good] == files[:2]
