"""Choice and copy of another job's checkpoint, whose folder is only read."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing import attempts, fork
from grpo_worker.checkpointing.fork import Fork, data_of
from grpo_worker.checkpointing.space import make_room
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    DamagedCheckpointError,
    Origin,
    commit,
    complete,
    directory,
    prune,
    set_aside,
    set_aside_sources,
    verify,
)
from support.objects import job, spec_of

MODEL, KL = "digest", {"value": 0.5, "initial": 0.1}
SIZE = 10_000  # bytes of the state in a checkpoint, and some more


def _spec(**changes: Any) -> GRPOJobSpec:
    """Return the spec of a fork of the job "source". Changes to resumeFrom, or else of the spec."""
    wanted = {name: changes.pop(name) for name in ("step", "load", "job", "path") if name in changes}
    made = job(**changes)
    made["spec"]["checkpoint"]["resumeFrom"] = {} if "path" in wanted else {"job": "source"}
    made["spec"]["checkpoint"]["resumeFrom"] |= wanted
    return spec_of(made)


def _save(job_folder: Path, step: int, parts: list[str] | None = None, model: str = MODEL) -> Path:
    path = directory(job_folder / "checkpoints", step, 1)
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "blob").write_text("of engines")
    (path / "__0_0.distcp").write_text(f"state of step {step}{' ' * SIZE}")
    (path / ".metadata").write_text("where it is")
    state = {"step": step, "kl": KL, "source": {"cursor": 8 * step}, "data": data_of(_spec())}
    (path / CONTROLLER_STATE).write_text(json.dumps(state))
    commit(job_folder / "checkpoints", step, Origin(model, "TP1", 1, parts))
    return path


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for step in (10, 20, 30):
        _save(folder, step, [])
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Folder of the fork's checkpoints; its controller has begun attempt 1."""
    assert attempts.claim(tmp_path / "fork", 1, "controller")
    return tmp_path / "fork" / "checkpoints"


def _adopted(own: Path, source: Path, **changes: Any) -> tuple[int, Any]:
    """Return step and controller's state of the job's first checkpoint."""
    assert Fork(_spec(**changes), source).adopt(own, MODEL, 1) is not None
    ((step, path),) = complete(own).items()
    return step, json.loads((path / CONTROLLER_STATE).read_text())


def test_the_newest_checkpoint_becomes_the_jobs_own(own: Path, source: Path) -> None:
    before = _tree(source)
    step, state = _adopted(own, source)
    path = directory(own, 30, 1)
    assert (step, state["source"], state["kl"]) == (30, {"cursor": 240}, KL)
    assert (path / "__0_0.distcp").read_text().rstrip() == "state of step 30"
    origin = verify(path, MODEL, contents=True)
    assert origin.source == str(directory(source / "checkpoints", 30, 1)) and origin.layout == "TP1"
    assert not (path / "weights").exists(), "they are of another job's version"
    assert _tree(source) == before
    assert Fork(_spec(), source).adopt(own, MODEL, 1) is None, "the job has a checkpoint"


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-00000020.attempt-1", "golden"])
def test_a_path_names_a_job_its_checkpoints_or_one_of_them(own: Path, source: Path, place: str) -> None:
    if place == "golden":
        directory(source / "checkpoints", 20, 1).rename(source / place)
    path = "/store/x"
    step = 30 if place in ("", "checkpoints") else 20
    assert _adopted(own, source / place, path=path)[0] == step


def test_the_copy_outlives_its_source(own: Path, source: Path) -> None:
    assert _adopted(own, source, step=10)[0] == 10
    prune(source / "checkpoints", 1, 1)
    assert list(complete(source / "checkpoints")) == [30]
    verify(directory(own, 10, 1), MODEL, contents=True)


def test_a_copy_is_removed_like_any_other_checkpoint(own: Path, source: Path) -> None:
    _adopted(own, source, step=10)
    before = _tree(source)
    for step in (11, 12):
        _save(own.parent, step)
    assert list(complete(own)) == [10, 11, 12]
    assert not make_room(own, 3, 1, missing=SIZE), "the other job still has its bytes"
    prune(own, 2, 1)
    assert list(complete(own)) == [11, 12] and _tree(source) == before


def test_a_store_without_hard_links_gets_symbolic_ones(
    own: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(os, "link", refuse)
    _adopted(own, source)
    verify(directory(own, 30, 1), MODEL, contents=True)
    assert (directory(own, 30, 1) / "__0_0.distcp").is_symlink()


def test_the_weights_alone_are_a_checkpoint_of_step_0(own: Path, source: Path) -> None:
    with_critic = {"advEstimator": "gae", "critic": {}}
    step, state = _adopted(own, source, load="weights", totalSteps=5, algorithm=with_critic)
    assert step == 0 and state is None
    assert verify(directory(own, 0, 1), MODEL, contents=True).policy_only


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"seed": 9}, False),
        ({"data": job()["spec"]["data"] | {"train": "reasoning-gym:lcm"}}, False),
        ({"algorithm": {"samplesPerPrompt": 2}}, True),
    ],
)
def test_the_position_is_one_in_the_same_data(
    own: Path, source: Path, changes: dict[str, Any], kept: bool
) -> None:
    assert ("source" in _adopted(own, source, **changes)[1]) is kept


def test_the_batch_size_does_not_move_the_position(own: Path, source: Path) -> None:
    data = job()["spec"]["data"] | {"trainBatchSize": 16, "responseLength": 2}
    assert "source" in _adopted(own, source, data=data)[1]


def test_a_checkpoint_that_is_removed_while_it_is_linked_gives_way_to_another(
    own: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, removed = fork._link, list[Path]()

    def remove_first(file: Path, to: Path) -> None:
        if not removed:
            removed.append(file)
            (file.parent / "COMMITTED").unlink()
            file.unlink()
        link(file, to)

    monkeypatch.setattr(fork, "_link", remove_first)
    assert _adopted(own, source)[0] == 20 and removed


def test_a_damaged_checkpoint_is_passed_over_and_stays(own: Path, source: Path) -> None:
    damaged = directory(source / "checkpoints", 30, 1)
    (damaged / ".metadata").write_text("elsewhere..")
    assert _adopted(own, source)[0] == 20
    assert (damaged / "COMMITTED").is_file()


def test_a_copy_in_which_ranks_read_changed_values_is_not_made_again(own: Path, source: Path) -> None:
    _adopted(own, source)
    set_aside(directory(own, 30, 1), DamagedCheckpointError("a bit is wrong"))
    assert attempts.claim(own.parent, 2, "controller")
    assert Fork(_spec(), source).adopt(own, MODEL, 2) == directory(source / "checkpoints", 20, 1)
    assert list(complete(own)) == [20]


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"step": 15}, ["checkpoint.resumeFrom.step=15", "job=source", "use step 10, 20, 30"]),
        ({"totalSteps": 30}, ["job=source", "spec.totalSteps=30", "set more than 30", "load to weights"]),
        (
            {"algorithm": {"advEstimator": "gae", "critic": {}}},
            ["job=source", "without spec.algorithm.critic", "load to weights"],
        ),
        (
            {"load": "weights", "model": {"path": "preset:tiny-moe", "multiTokenPrediction": True}},
            ["job=source", "without spec.model.multiTokenPrediction, which this job sets: remove it"],
        ),
    ],
)
def test_errors_name_field_value_and_remedy(
    own: Path, source: Path, changes: dict[str, Any], texts: list[str]
) -> None:
    _refused(Fork(_spec(**changes), source), own, texts)


def _refused(wanted: Fork, own: Path, texts: list[str], model: str = MODEL) -> None:
    with pytest.raises(ValueError, match="resumeFrom") as refused:
        wanted.check(own, model)
    assert all(text in str(refused.value) for text in texts), str(refused.value)
    with pytest.raises(ValueError, match="resumeFrom"):
        wanted.adopt(own, model, 1)
    assert not complete(own)


def test_another_model_and_a_folder_without_checkpoints_are_refused(own: Path, source: Path) -> None:
    _refused(Fork(_spec(), source), own, ["is of another model", "set spec.model.path"], "other")
    _refused(Fork(_spec(), source / "none"), own, ["none has no complete checkpoint: name another"])
    for path in (source / "checkpoints").iterdir():
        (path / "__0_0.distcp").write_text("torn")
    _refused(Fork(_spec(), source), own, ["checkpoints of step 10, 20, 30 are damaged"])


def test_a_marker_that_cannot_be_read_is_named(own: Path, source: Path) -> None:
    path = directory(source / "checkpoints", 30, 1)
    (path / "COMMITTED").write_text("{")
    _refused(Fork(_spec(path="/store/x"), path), own, ["path=/store/x", "COMMITTED cannot be read"])
    set_aside(directory(source / "checkpoints", 30, 1), DamagedCheckpointError("a bit is wrong"))
    assert set_aside_sources(source / "checkpoints") == set()


def test_the_check_is_silent_where_the_job_has_a_checkpoint(own: Path, source: Path) -> None:
    _adopted(own, source)
    Fork(_spec(), source / "deleted").check(own, MODEL)
