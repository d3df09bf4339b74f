"""Start of a job from another job's checkpoint in an object store.

fsspec's store in memory stands in for S3's server; tests/worker/test_bucket_forks.py has a real one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.checkpointing import attempts, fork
from grpo_worker.checkpointing.fork import Fork, data_of
from grpo_worker.checkpointing.object_files import ObjectFiles, upload
from grpo_worker.checkpointing.store import (
    CONTROLLER_STATE,
    DamagedCheckpointError,
    Origin,
    commit,
    complete,
    directory,
    newest_sound,
    prune,
    set_aside,
    state_folder,
    verify,
)
from grpo_worker.megatron.checkpoint.draft import small_files
from support.objects import job, spec_of

MODEL = "digest"
FILE = "__0_0.distcp"


@pytest.fixture
def bucket(tmp_path: Path) -> UPath:
    return UPath(f"memory:/{tmp_path}")


@pytest.fixture
def source(bucket: UPath) -> UPath:
    """A job with checkpoints of the steps 10, 20 and 30."""
    for step in (10, 20, 30):
        _save(bucket / "source", step)
    return bucket / "source"


@pytest.fixture
def own(bucket: UPath) -> UPath:
    """Folder of the fork's checkpoints; its controller has begun attempt 1."""
    assert attempts.claim(bucket / "fork", 1, "controller")
    return bucket / "fork" / "checkpoints"


def _spec(**changes: Any) -> GRPOJobSpec:
    wanted = {"job": "source"} | {name: changes.pop(name) for name in ("step", "load") if name in changes}
    made = job(**changes)
    made["spec"]["checkpoint"] = {"store": {"uri": "s3://runs/x"}, "resumeFrom": wanted}
    return spec_of(made)


def _save(folder: UPath, step: int, attempt: int = 1) -> UPath:
    place = directory(folder / "checkpoints", step, attempt)
    upload(place / FILE, [lambda stream: stream.write(f"state of step {step}".encode())])
    (place / ".metadata").write_text("where it is")
    state = {"step": step, "source": {"cursor": 8 * step}, "data": data_of(_spec())}
    (place / CONTROLLER_STATE).write_text(json.dumps(state))
    commit(folder / "checkpoints", step, Origin(MODEL, "TP1", attempt, []))
    return place


def _objects(folder: UPath) -> dict[str, bytes]:
    return {name: folder.fs.cat_file(name) for name in folder.fs.find(folder.path)}


def _state(path: UPath) -> bytes:
    """Return what ranks read of a checkpoint."""
    size = int(json.loads((path / "COMMITTED").read_text())["files"][FILE])
    return ObjectFiles(path).read(FILE, 0, size)


def test_the_objects_stay_where_they_are_and_are_read_there(own: UPath, source: UPath) -> None:
    before = _objects(source)
    taken = directory(source / "checkpoints", 30, 1)
    assert str(Fork(_spec(), source).adopt(own, MODEL, 1)) == str(taken)
    ((step, path),) = complete(own).items()
    assert step == 30 and str(state_folder(path)) == str(taken)
    assert [Path(name).name for name in sorted(_objects(path))] == ["COMMITTED", CONTROLLER_STATE]
    origin = verify(path, MODEL, contents=True)
    assert origin.in_place and origin.layout == "TP1" and newest_sound(own, MODEL) == path
    assert _state(path) == b"state of step 30"
    draft = small_files(state_folder(path))
    assert (draft.path / ".metadata").read_text() == "where it is"
    draft.remove()
    assert _objects(source) == before
    assert Fork(_spec(), source).adopt(own, MODEL, 1) is None, "the job has a checkpoint"


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-00000020.attempt-1"])
def test_a_uri_names_a_job_its_checkpoints_or_one_of_them(own: UPath, source: UPath, place: str) -> None:
    assert Fork(_spec(), source / place if place else source).adopt(own, MODEL, 1) is not None
    assert list(complete(own)) == [20 if "step" in place else 30]


def test_own_state_and_position_are_those_of_the_fork(own: UPath, source: UPath) -> None:
    Fork(_spec(seed=9), source).adopt(own, MODEL, 1)
    state = json.loads((directory(own, 30, 1) / CONTROLLER_STATE).read_text())
    assert state["step"] == 30 and "source" not in state, "it reads other data"
    Fork(_spec(load="weights", totalSteps=5), source).adopt(own.parent.parent / "other" / "c", MODEL, 1)
    (path,) = complete(own.parent.parent / "other" / "c").values()
    assert verify(path, MODEL, contents=True).policy_only
    assert json.loads((path / CONTROLLER_STATE).read_text()) is None


def test_a_fork_of_a_fork_reads_where_the_objects_are(own: UPath, source: UPath, bucket: UPath) -> None:
    Fork(_spec(step=20), source).adopt(own, MODEL, 1)
    second = bucket / "second" / "checkpoints"
    Fork(_spec(), own.parent).adopt(second, MODEL, 1)
    own.fs.rm(own.path, recursive=True)
    (path,) = complete(second).values()
    verify(path, MODEL, contents=True)
    assert _state(path) == b"state of step 20"


def test_a_copy_is_removed_without_its_source(own: UPath, source: UPath) -> None:
    Fork(_spec(step=10), source).adopt(own, MODEL, 1)
    before = _objects(source)
    for step in (11, 12):
        _save(own.parent, step)
    prune(own, 2, 1)
    assert list(complete(own)) == [11, 12] and _objects(source) == before


def test_a_source_that_is_removed_later_is_named_and_no_other_one_is_taken(own: UPath, source: UPath) -> None:
    Fork(_spec(), source).adopt(own, MODEL, 1)
    gone = directory(source / "checkpoints", 30, 1)
    gone.fs.rm(gone.path, recursive=True)
    with pytest.raises(DamagedCheckpointError) as damaged:
        verify(directory(own, 30, 1), MODEL)
    assert f"checkpoint {gone}: " in str(damaged.value) and "is missing" in str(damaged.value)
    assert newest_sound(own, MODEL) is None, "it is set aside"
    wanted = Fork(_spec(), source)
    with pytest.raises(ValueError, match="was removed before it had a checkpoint of its own") as refused:
        wanted.check(own, MODEL)
    assert str(refused.value).startswith(f"checkpoint.resumeFrom.job=source: {gone}, from which this job")
    with pytest.raises(ValueError, match="was removed before it had a checkpoint of its own"):
        wanted.adopt(own, MODEL, 2)


def test_a_missing_object_is_named_where_ranks_read_it(own: UPath, source: UPath) -> None:
    Fork(_spec(), source).adopt(own, MODEL, 1)
    file = directory(source / "checkpoints", 30, 1) / FILE
    files = ObjectFiles(directory(own, 30, 1))
    file.fs.rm(file.path)
    with pytest.raises(DamagedCheckpointError) as missing:
        files.read(FILE, 0, 10)
    assert str(missing.value).startswith(f"checkpoint {file.parent}: {FILE} is missing")


def test_changed_objects_are_found_by_the_forks_own_marker(own: UPath, source: UPath) -> None:
    """The fork has noted the digests: replacing those beside the state changes nothing."""
    Fork(_spec(), source).adopt(own, MODEL, 1)
    place = directory(source / "checkpoints", 30, 1)
    upload(place / FILE, [lambda stream: stream.write(b"state of step 99")])
    with pytest.raises(DamagedCheckpointError, match="was changed after the save"):
        _state(directory(own, 30, 1))
    set_aside(directory(own, 30, 1), DamagedCheckpointError("found by ranks"))
    assert str(Fork(_spec(), source).adopt(own, MODEL, 2)).endswith("step-00000020.attempt-1")


def test_a_checkpoint_that_is_removed_while_it_is_taken_gives_way_to_another(
    own: UPath, source: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = directory(source / "checkpoints", 30, 1)

    def remove_first(root: UPath, step: int, origin: Origin) -> None:
        if first.fs.exists(first.path):
            first.fs.rm(first.path, recursive=True)
        commit(root, step, origin)

    monkeypatch.setattr(fork, "commit", remove_first)
    Fork(_spec(), source).adopt(own, MODEL, 1)
    assert list(complete(own)) == [20] and not directory(own, 30, 1).exists()


def test_a_copy_of_a_file_system_is_refused(own: UPath, source: UPath) -> None:
    place = directory(source / "checkpoints", 30, 1)
    for name in (f"{FILE}.sha256", "COMMITTED"):
        (place / name).unlink()
    commit(source / "checkpoints", 30, Origin(MODEL, "TP1", 1, []))
    with pytest.raises(ValueError, match="is the copy of a checkpoint in a file system, without the digests"):
        Fork(_spec(), source).adopt(own, MODEL, 1)


def test_a_source_without_access_or_checkpoints_is_named(
    own: UPath, source: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"job=source: .*/none has no complete checkpoint: name another"):
        Fork(_spec(), source.parent / "none").check(own, MODEL)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(source.fs), "info", refuse)
    with pytest.raises(ValueError, match=r"has no access to .*source \(Access Denied\): allow it to read"):
        Fork(_spec(), source).adopt(UPath("memory:/elsewhere/c"), MODEL, 1)
